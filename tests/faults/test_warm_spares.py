"""Generations whose ranks are processes that waited for it: they do what a cold rank does, and nothing of them is left.

Most jobs here load a torch that is a stand-in of a few lines, so that spares are ready at once.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launcher_kit import PROMISED_S, Job, Start, kill

WORDS = """\
WARM = int("torch" in sys.modules)
GENERATION = int(os.environ["HORA_GENERATION"])
from hora import pulse


def get_going():
    pulse.mine().open(60.0)
    pulse.mine().begin_step()
    pulse.mine().end_step()
    tell("born", GENERATION, os.getpid(), WARM)


def await_go():
    while not os.path.exists(f"{os.environ['GO']}-{GENERATION}"):
        time.sleep(0.005)


"""

STAND_IN = """\
import os, sys, time

SEEN = [os.environ.get(name) for name in ("HORA_GENERATION", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "PYTHONPATH", "HORA_SPARE")]
print("torch tells what it tells when it is imported", file=sys.stderr)
if os.path.exists(os.environ["GO"] + "-never"):
    time.sleep(600)
"""

FACTS = """\
def facts():
    import re, resource, threading, torch
    own = ("HORA_GENERATION", "HORA_JOB_DIR", "HORA_RENDEZVOUS", "HORA_KEY_FILE", "MASTER_PORT")
    generation, *seen = torch.SEEN
    page = pulse.read_words(pulse.page_path(__import__("pathlib").Path(os.environ["HORA_JOB_DIR"]), RANK))
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags), "cwd": os.getcwd(),
        "main": [__name__, __file__, *(re.sub(" at 0x[0-9a-f]+", "", repr(it)) for it in (__spec__, __loader__))],
        "globals": sys.modules["__main__"].__dict__ is globals(),
        "environ": {name: value for name, value in os.environ.items() if name not in own},
        "own": [name in os.environ for name in own], "in_its_directory": os.environ["HORA_KEY_FILE"].startswith(os.environ["HORA_JOB_DIR"]),
        "streams": [[s.name, s.mode, s.encoding, s.errors, s.isatty(), s.line_buffering, s.seekable()] for s in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": sorted(os.listdir("/proc/self/fd")), "threads": [thread.name for thread in threading.enumerate()],
        "handlers": [repr(signal.getsignal(n)).split(" at ")[0] for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1)],
        "place": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)],
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "umask": os.umask(0o22), "seen": [generation == str(GENERATION), *seen],
        "site": ["sitecustomize" in sys.modules, getattr(sys, "told_by_site", None)],
        "marked": any(v == b"HORA_JOB_DIR=" + os.environ["HORA_JOB_DIR"].encode() for v in open("/proc/self/environ", "rb").read().split(b"\\0")),
        "memory": open("/proc/self/oom_score_adj").read(),
        "page": [page.steps, page.pid == os.getpid()],
    }


"""

Warm = Callable[..., Job]


@pytest.fixture
def warm(start: Start, tmp_path: Path) -> Warm:
    """`warm(body, *flags)` starts a job with spares that load the stand-in."""
    library = tmp_path / "library"
    (library / "torch").mkdir(parents=True)
    (library / "torch" / "__init__.py").write_text(STAND_IN)
    path = os.pathsep.join(filter(None, [str(library), os.environ.get("PYTHONPATH")]))

    def start_job(body: str, *flags: str, ranks: int = 1, restarts: int = 1, **others: Any) -> Job:
        words = ("--verbose", "--warm-spares", "--max-restarts", str(restarts))
        return start(WORDS + body, *words, *flags, ranks=ranks, PYTHONPATH=path, GO=str(tmp_path / "go"), **others)

    return start_job


def ready(job: Job, count: int = 1, times: int = 1, timeout_s: float = 60.0) -> list[int]:
    """The spares, once all are ready for the `times`-th time."""
    wait_until(lambda: job.err.count(f"spares for {count} ranks are ready") == times, job, timeout_s)
    return spares(job, generation=times)


def spares(job: Job, generation: int) -> list[int]:
    """Processes that wait for a generation, or are its warm ranks."""
    return [process.pid for process in job.members() if _waits_for(process, str(generation))]


def _waits_for(process: psutil.Process, generation: str) -> bool:
    try:
        environ = process.environ()
    except psutil.Error:
        return False
    return "HORA_SPARE" in environ and environ["HORA_GENERATION"] == generation and "raise SystemExit(1)" not in process.cmdline()


def wait_until(holds: Callable[[], bool], job: Job, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"waited in vain\n{job.out}\n{job.err}"
        time.sleep(0.005)


def born(job: Job, generation: int, *, warm: bool, ranks: int = 1) -> list[int]:
    """The processes of a generation, all of which are warm or none."""
    told = job.expect("born", ranks)
    assert {(numbers[0], numbers[2]) for numbers in told.values()} == {(generation, int(warm))}
    return [numbers[1] for numbers in told.values()]


ENDS = {
    "exit": "sys.exit(7)",
    "error": "def fail():\n    raise ValueError('no such number')\n\n\nfail()",
    "interrupt": "raise KeyboardInterrupt",
}


@pytest.mark.parametrize(
    ("end", "code", "module"), [("exit", 7, False), ("error", 1, False), ("interrupt", 130, False), ("error", 1, True)]
)
def test_a_warm_rank_cannot_tell_that_it_is_warm(warm: Warm, tmp_path: Path, end: str, code: int, module: bool) -> None:
    """What it sees of its start, its output, its traceback and its exit code are those of the cold rank before it."""
    logs = tmp_path / "logs"
    if end == "exit":
        (tmp_path / "library" / "sitecustomize.py").write_text("import os, sys\nsys.told_by_site = os.environ.get('PYTHONPATH')\n")
    body = f"{FACTS}get_going()\nawait_go()\nimport json, torch\nprint(json.dumps(facts(), sort_keys=True))\n{ENDS[end]}\n"
    others = {"target": "job0"} if module else {}
    flags = ["--wdir", str(tmp_path), "-m"] if module else []
    job = warm(body, "--log-dir", str(logs), "--bind", "core", *flags, words=["--lr", "0.1", "two words"], **others)
    born(job, 0, warm=False)
    ready(job)
    (tmp_path / "go-0").touch()
    born(job, 1, warm=True)
    (tmp_path / "go-1").touch()
    assert job.wait() == code, job.err
    cold, hot = ((logs / place / "rank0.log").read_text() for place in (".", "restart-1"))
    assert "torch tells what it tells" in cold
    assert '"page": [1, true]' in cold
    assert by_stream(hot) == by_stream(cold)


def by_stream(log: str) -> tuple[list[str], list[str]]:
    """The facts, which go to standard output, and the rest: which of two streams is read first is not the rank's doing."""
    lines = log.splitlines()
    return [line for line in lines if line.startswith("{")], [line for line in lines if not line.startswith("{")]


def test_a_killed_rank_is_followed_by_warm_ones_again_and_again(warm: Warm) -> None:
    job = warm("print('hello', GENERATION, flush=True)\nget_going()\nif GENERATION < 2:\n    wait_forever()\n", ranks=2, restarts=2)
    for generation in (0, 1):
        pids = born(job, generation, warm=generation > 0, ranks=2)
        waiting = ready(job, count=2, times=generation + 1)
        kill(pids[1])
    assert sorted(born(job, 2, warm=True, ranks=2)) == sorted(waiting)
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [f"[{rank}] hello {generation}" for rank in (0, 1) for generation in (0, 1, 2)]
    assert job.gone_after(waiting) < PROMISED_S
    assert job.members() == []
    assert job.left_in_temporary() == []


@pytest.mark.parametrize("dead", [False, True], ids=["loading", "dead"])
def test_without_a_spare_that_is_ready_the_rank_is_started_cold(warm: Warm, tmp_path: Path, dead: bool) -> None:
    if not dead:
        (tmp_path / "go-never").touch()
    job = warm("get_going()\nif GENERATION == 0:\n    wait_forever()\n")
    rank = born(job, 0, warm=False)
    if dead:
        kill(*ready(job))
        wait_until(lambda: not spares(job, 1), job)
    else:
        wait_until(lambda: bool(spares(job, 1)), job)
    kill(*rank)
    born(job, 1, warm=False)
    assert job.wait() == 0
    assert job.members() == []


def stop(job: Job, signum: int) -> int:
    os.kill(job.pid, signum)
    return job.wait()


def kill_both(job: Job) -> int:
    """The launcher, when there is no guardian that could do anything about it."""
    os.kill(job.pid, signal.SIGSTOP)
    kill(job.guardian().pid)
    kill(job.pid)
    return job.wait()


@pytest.mark.parametrize(
    ("end", "code", "loading"),
    [
        (lambda job: stop(job, signal.SIGINT), 130, False),
        (lambda job: stop(job, signal.SIGTERM), 143, True),
        (lambda job: stop(job, signal.SIGKILL), -signal.SIGKILL, False),
        (lambda job: stop(job, signal.SIGKILL), -signal.SIGKILL, True),
        (kill_both, -signal.SIGKILL, False),
        (kill_both, -signal.SIGKILL, True),
    ],
    ids=["ctrl-c", "sigterm-loading", "killed", "killed-loading", "killed-with-guardian", "killed-with-guardian-loading"],
)
def test_no_spare_outlives_its_launcher(warm: Warm, tmp_path: Path, end: Callable[[Job], int], code: int, loading: bool) -> None:
    if loading:
        (tmp_path / "go-never").touch()
    job = warm("get_going()\nwait_forever()\n")
    rank = born(job, 0, warm=False)
    wait_until(lambda: bool(spares(job, 1)), job)
    left = [*rank, *(spares(job, 1) if loading else ready(job))]
    assert len(left) == 2
    assert end(job) == code
    assert job.gone_after(left) < PROMISED_S
    wait_until(lambda: job.members() == [], job)  # the guardian goes last


def test_no_spare_outlives_a_job_that_ends_well_or_cannot_go_on(warm: Warm, tmp_path: Path) -> None:
    job = warm("get_going()\nawait_go()\nos.remove(sys.argv[0]) if GENERATION == 0 else None\nsys.exit(3)\n", restarts=2)
    born(job, 0, warm=False)
    ready(job)
    (tmp_path / "go-0").touch()
    assert job.wait() == 2
    assert "there is no script" in job.err
    assert job.members() == []
    assert job.left_in_temporary() == []


def test_a_program_is_started_cold(warm: Warm, tmp_path: Path) -> None:
    words = ["-c", 'test "$HORA_GENERATION" = 1']
    job = warm("", "--no-python", target="/bin/sh", words=words)
    assert job.wait() == 0
    assert job.err.count("all ranks are started anew") == 1


WITH_TORCH = """\
import torch
import hora

hora.init()
told = hora.all_reduce(torch.full((2,), 1.0 + RANK)).tolist()
print(GENERATION, told, torch.cuda.is_initialized(), torch.get_num_threads(), flush=True)
get_going()
if GENERATION == 0:
    wait_forever()
hora.shutdown()
"""


def test_warm_ranks_meet_and_sum(start: Start) -> None:
    job = start(WORDS + WITH_TORCH, "--verbose", "--warm-spares", "--max-restarts", "1")
    pids = born(job, 0, warm=False, ranks=2)
    waiting = ready(job, count=2)
    kill(pids[0])
    assert sorted(born(job, 1, warm=True, ranks=2)) == sorted(waiting)
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [f"[{rank}] {generation} [3.0, 3.0] False 1" for rank in (0, 1) for generation in (0, 1)]
    assert job.gone_after(waiting) < PROMISED_S
    assert job.members() == []
