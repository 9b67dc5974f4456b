"""What to say about a job that hangs: in a few lines for the screen, and with all stacks for the file. Pure."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import hora
from hora.launch.standing import Hang, Standing
from hora.pulse import Doing, Section

FILE: Final = "hang-report.txt"
"""Name of the file, among the logs."""

_MOST_RANKS, _MOST_FRAMES = 8, 4
_MAX_BYTES = 600_000  # it travels in one message
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$', re.MULTILINE)
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(hora.__file__))
_FOREIGN = ("/site-packages/", "/dist-packages/", "<frozen ")

_SECTIONS = {
    Section.OUTSIDE: "in no job of Hora's",
    Section.START: "in its first step",
    Section.STEP: "in step {next} since the start",
    Section.CHECKPOINT: "in a checkpoint, {steps} steps after the start",
    Section.EVALUATION: "after step {steps} since the start",
}
_DOINGS = {Doing.DATA: "waiting for data", Doing.WAIT: "waiting for other ranks", Doing.DEVICE: "waiting for its device"}
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, which waits for a disk or a device and lets nobody end it meanwhile",
    "T": "stopped",
    "t": "halted by a debugger",
    "Z": "ended",
}


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: str
    name: str

    @property
    def is_the_users(self) -> bool:
        """Whether it is no library's and not Hora's."""
        return not self.file.startswith(_LIBRARIES) and not any(part in self.file for part in _FOREIGN)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.name}"


def main_frames(stacks: str) -> list[Frame]:
    """The stack of the main thread, the innermost frame first; nothing if it is not there."""
    # Python lists the newest thread first.
    return [Frame(*found) for found in _FRAME.findall(_THREAD.split(stacks)[-1])]


def user_frames(stacks: str) -> list[Frame]:
    """Those frames of the main thread that are of the user's code; all, if none is."""
    frames = main_frames(stacks)
    return [frame for frame in frames if frame.is_the_users] or frames


def summarize(hang: Hang, standings: Sequence[Standing], path: str) -> str:
    """What fits on a screen: who is missing and where, and where the others wait. `path` is where the rest is."""
    culprits = {culprit.rank for culprit in hang.culprits}
    lines = [_head(hang)]
    for standing in hang.culprits[:_MOST_RANKS]:
        lines += [f"  {_say(standing)}", *_say_stack(standing, _MOST_FRAMES if len(hang.culprits) <= 2 else 1)]
    others = [standing for standing in standings if standing.rank not in culprits]
    lines += [f"  {line}" for line in _say_alike(others)]
    lines += [f"  {line}" for standing in standings for line in standing.note.splitlines()]
    advice = "" if hang.stopped else f"; --deadline {_option(hang.culprits[0])}=SECONDS, or =off, where this is no hang"
    return "\n".join([*lines, f"stacks of all ranks: {path}{advice}"])


def write_out(hang: Hang, standings: Sequence[Standing]) -> str:
    """All that is known, with the stacks of all threads of all ranks."""
    parts = [_head(hang), *map(_say, standings), *(standing.note for standing in standings if standing.note)]
    for standing in standings:
        stacks = standing.stacks.rstrip() or f"(none: the process is {_STATES.get(standing.state, 'unknown here')})"
        parts.append(f"\nrank {standing.rank} on {standing.host} (process {standing.pid}), the innermost frame first\n{stacks}")
    text = "\n".join(parts) + "\n"
    return text if len(text) <= _MAX_BYTES else text[:_MAX_BYTES] + "\n...\n"


def _head(hang: Hang) -> str:
    who = _say_ranks([culprit.rank for culprit in hang.culprits])
    verb = "is" if len(hang.culprits) == 1 else "are"
    if hang.stopped:
        return f"{who} {verb} stopped, for {hang.silent_s:.1f} s now: by SIGSTOP, by a terminal, or with its control group; all ranks are ended"
    limit_s = max(culprit.limit_s for culprit in hang.culprits)
    return f"the job hangs: {who} {verb} missing, and no rank has got on for {hang.silent_s:.0f} s (deadline {limit_s:.0f} s); all ranks are ended"


def _say(standing: Standing) -> str:
    """Where a rank stands, in a line."""
    where = _SECTIONS[standing.section].format(steps=standing.steps, next=standing.steps + 1)
    state = _STATES.get(standing.state, "alive")
    clauses = [f"rank {standing.rank} on {standing.host} (process {standing.pid}): {state} {where}"]
    if standing.call:
        clauses.append(f"waiting in {standing.call}" if standing.waits else f"has begun {standing.call}")
    elif standing.doing in _DOINGS:
        clauses.append(_DOINGS[standing.doing])
    if standing.begun:
        clauses.append(f"last finished #{standing.finished}" if standing.finished else "has finished no collective")
    return ", ".join([*clauses, f"silent for {standing.silent_s:.1f} s"])


def _say_stack(standing: Standing, most: int) -> list[str]:
    frames = user_frames(standing.stacks)
    rest = ["    ..."] if len(frames) > most > 1 else []
    return [f"    {frame}" for frame in frames[:most]] + rest


def _say_alike(standings: Sequence[Standing]) -> list[str]:
    """A line for all ranks that wait at the same place."""
    alike: dict[str, list[int]] = {}
    for standing in standings:
        frames = user_frames(standing.stacks)
        at = f", at {frames[0]}" if frames else ""
        doing = (
            f"waiting in {standing.call}"
            if standing.call and standing.waits
            else _DOINGS.get(standing.doing, _STATES.get(standing.state, "alive"))
        )
        alike.setdefault(f"{doing}{at}", []).append(standing.rank)
    lines = [f"{_say_ranks(ranks)}: {what}" for what, ranks in alike.items()]
    return lines if len(lines) <= _MOST_RANKS else [*lines[:_MOST_RANKS], f"... and {len(lines) - _MOST_RANKS} more"]


def _say_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[: 2 * _MOST_RANKS]))
    return f"ranks {shown}" + (f" and {len(ranks) - 2 * _MOST_RANKS} more" if len(ranks) > 2 * _MOST_RANKS else "")


def _option(standing: Standing) -> str:
    return {Section.START: "start", Section.STEP: "step", Section.CHECKPOINT: "checkpoint"}.get(standing.section, "evaluation")
