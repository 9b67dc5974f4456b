"""The time of day jumps, as when a clock is set: nothing that waits, counts or compares may depend on it.

Only the processes of the job see it: a library in C, loaded before all others, adds what a file says to the clock of the day, and to no other.
"""

import subprocess
import tempfile
from pathlib import Path

from hora.diag.chaos import rights
from hora.diag.chaos.journal import named, starts_of
from hora.diag.chaos.restarts import judge
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario
from hora.diag.chaos.trial import ChaosError, job

_HELD, _STEPS, _DAY_S = 7, 60, 86400
_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void)
{
    char text[32] = "";
    const char *path = getenv("HORA_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    return got > 0 ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to)
        *to = now.tv_sec;
    return now.tv_sec;
}
"""


def _set(ground: Ground, draw: Draw) -> Outcome:
    settings = ground.settings(held=(_HELD,), steps=_STEPS)
    place = Path(settings.directory)
    clock = place / "clock"
    clock.write_text("0")
    with job(settings, variables={"LD_PRELOAD": str(_library(place)), "HORA_CHAOS_CLOCK": str(clock)}) as trial:
        began = named(trial.held_at(_HELD), "held")
        clock.write_text(str(_DAY_S if draw.variant == "a day on" else -_DAY_S))
        trial.let_go(_HELD)
        code = trial.wait()
        events = trial.events()
        problems = judge(trial, settings, ground.golden(settings), code)
        problems += [] if len(starts_of(events)) == 1 else ["nothing may be started anew because a clock is set"]
    days = {round((event.fields["day_s"] - began[0].fields["day_s"]) / _DAY_S) for event in named(events, "end")}
    problems += [] if days == {1 if draw.variant == "a day on" else -1} else ["the fault did not strike"]
    return Outcome({"lost_steps": 0}, problems)


def _library(place: Path) -> Path:
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "clock.c", place / "clock.so"
        source.write_text(_SOURCE, encoding="utf-8")
        built = subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True, text=True, timeout=60, check=False
        )
    if built.returncode != 0:
        raise ChaosError(f"cc cannot build the library that shifts the clock: {built.stderr.strip()}")
    return library


SCENARIOS = (
    Scenario(
        "F19", "the clock is set by a day", _set, ("a day on", "a day back"), {"lost_steps": 0}, lacks=lambda _: rights.to_shift_clocks()
    ),
)  # fmt: skip
