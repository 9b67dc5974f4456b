"""Files of the user's that are wrong: configurations and texts, through the command that reads them."""

import os
import subprocess
import sys
import time
from pathlib import Path

from hora.diag.chaos import oracles
from hora.diag.chaos.scenario import Draw, Ground, Outcome, Scenario

_CODE = 2
_AT_ONCE = 6

_CONFIGURATIONS = {
    # what is wrong: the file, and the line that is to be named
    "a tab": (b"optimizer:\n\tlr: 1\n", 2),
    "an unclosed list": (b"seed: [1, 2\nepochs: 1\n", 2),
    "an unclosed quote": (b"data: 'x\nseed: 1\n", 3),
    "two documents": (b"seed: 1\n---\nseed: 2\n", 2),
    "a key twice": (b"seed: 1\nepochs: 1\nseed: 1\n", 3),
    "an unknown key": (b"seed: 1\nlearning_rate: 1\n", 2),
    "an alias": (b"seed: &a 1\n", 1),
    "an object of Python's": (b"seed: !!python/object/apply:os.system ['exit 1']\n", 1),
    "an octal number": (b"seed: 010\n", 1),
    "a time of day": (b"seed: 12:30\n", 1),
    "yes for true": (b"exact: yes\n", 1),
    "a fraction": (b"seed: 1.5\n", 1),
    "other bytes": (bytes(range(256)), None),
    "another encoding": ("seed: 1\n".encode("utf-16"), None),
    "brackets without end": (b"seed: " + b"[" * 10_000, 1),
}

_TEXTS = {
    "none": ({}, r"must hold a training, a validation and a test text, but it lacks train\.txt"),
    "an empty one": ({"train.txt": b""}, r"train\.txt is empty"),
    "other bytes": ({"train.txt": b"a b\n\xff\xfe c\n"}, r"train\.txt:2: the text must be UTF-8, but byte 1 of the line is 0xff"),
}


def _configure(ground: Ground, draw: Draw) -> Outcome:
    """Some of them, each refused with its line before anything is started."""
    problems: list[str] = []
    longest_s = 0.0
    for name in draw.random.sample(sorted(_CONFIGURATIONS), _AT_ONCE):
        content, line = _CONFIGURATIONS[name]
        path = Path(ground.place()) / "config.yaml"
        path.write_bytes(content)
        code, said, took_s = _train(path.parent, "--config", str(path), "--data", "excerpt")
        longest_s = max(longest_s, took_s)
        found = [*oracles.ended_with(code, _CODE), *oracles.says(said, rf"config\.yaml:{'' if line is None else f'{line}:'}")]
        problems += [f"{name}: {problem}" for problem in found]
        if os.listdir(path.parent) != ["config.yaml"]:
            problems.append(f"{name}: it was refused, and has left {', '.join(os.listdir(path.parent))}")
    return Outcome({"detected_s": longest_s}, problems)


def _read(ground: Ground, draw: Draw) -> Outcome:
    """Refused before the first update."""
    texts, words = _TEXTS[draw.random.choice(sorted(_TEXTS))]
    place = Path(ground.place())
    for name in ("valid.txt", "test.txt") if texts else ():
        (place / name).write_bytes(b"a b c\n")
    for name, content in texts.items():
        (place / name).write_bytes(content)
    code, said, took_s = _train(place, "--config", "demo", "--data", str(place), "--nproc", "2")
    problems = [*oracles.ended_with(code, _CODE), *oracles.says(said, words)]
    problems += ["an update was made"] if any(path.stat().st_size for path in place.glob("runs/*/metrics.jsonl")) else []
    return Outcome({"detected_s": took_s}, problems)


def _train(place: Path, *words: str) -> tuple[int, str, float]:
    """Exit code of `hora train lm` in a directory, what it has said, and how long it took."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "hora", "train", "lm", *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=place, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began_s


SCENARIOS = (
    Scenario(
        "F22", "a configuration or a text that is malformed",
        lambda ground, draw: (_configure if draw.variant == "configuration" else _read)(ground, draw), ("configuration", "text"),
    ),
)  # fmt: skip
