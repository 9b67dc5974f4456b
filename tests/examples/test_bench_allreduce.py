"""`hora bench allreduce` as its user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hora.cli.main import main

BENCH = [sys.executable, "-m", "hora", "bench", "allreduce"]

SPOILT = """
import sys

from hora.cli.main import main
from hora.comm.algorithms.ring import Ring

reduce = Ring.all_reduce


def spoilt(self, tensor, op, groups, *, async_op):
    reduce(self, tensor, op, groups, async_op=async_op)
    tensor[tensor.numel() // 2] *= 2
    return ()


Ring.all_reduce = spoilt
sys.exit(main(["bench", "allreduce", "--sizes", "1K", "--rounds", "1", "--backends", "gloo", "--json", sys.argv[1]]))
"""


def environment(directory: Path) -> dict[str, str]:
    return {**os.environ, "HORA_STATE_DIR": str(directory / "state")}


def test_all_is_measured_shown_written_drawn_and_saved(tmp_path: Path) -> None:
    words = ["--ranks", "2", "--sizes", "1K,64K", "--rounds", "3", "--json", "rows.json", "--png", "all.png", "--save"]
    done = subprocess.run(
        [*BENCH, *words], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = json.loads((tmp_path / "rows.json").read_text())
    variants = [(backend, algorithm) for backend in ("shm", "gloo") for algorithm in ("native", "ring", "recursive_doubling", "ordered")]
    assert [(row["bytes"], row["backend"], row["algorithm"], row["ranks"]) for row in rows] == [
        (size, *variant, 2) for size in (1024, 65536) for variant in variants
    ]
    for row in rows:
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
        assert len(row["samples"]) == 3
        assert row["bus_gb_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)  # 2 ranks: 2 * 1/2 of the bytes
        assert row["limit_gb_s"] > 0
        assert row.keys() >= {"what", "value", "unit", "machine", "versions", "command", "commit"}
        assert row["command"].startswith("hora bench allreduce --ranks 2")
    lines = done.stdout.splitlines()
    assert sum("shm" in line or "gloo" in line for line in lines) == len(rows)
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "state" / "algorithms.json").read_text())
    assert [(entry["backend"], entry["ranks"]) for entry in saved["entries"]] == [("gloo", 2), ("shm", 2)]
    assert sorted(os.listdir(tmp_path)) == ["all.png", "rows.json", "state"]


def test_a_wrong_sum_ends_the_command_and_is_named(tmp_path: Path) -> None:
    """In a job of its own making, whose script spoils the ring: nothing is written, and the job fails."""
    (tmp_path / "spoilt.py").write_text(SPOILT)
    done = subprocess.run(
        [sys.executable, "-m", "hora", "run", "-np", "2", str(tmp_path / "spoilt.py"), str(tmp_path / "rows.json")],
        env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "hora: wrong sum of 1 KiB on 2 ranks with gloo/ring: element 128 of call 0 is 774 on rank 0, but the sum is 387" in done.stderr
    assert not (tmp_path / "rows.json").exists()


def test_a_wrong_sum_of_ranks_that_it_started_ends_the_command_too(tmp_path: Path) -> None:
    """A module that Python imports at its start spoils the ring in every process."""
    site = "import hora.comm.algorithms.ring as ring\n" + SPOILT[SPOILT.index("reduce =") : SPOILT.index("sys.exit")].replace(
        "Ring.", "ring.Ring."
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif 'RANK' in os.environ:\n{''.join(f'    {line}' for line in site.splitlines(True))}"
    )
    environ = environment(tmp_path) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    words = ["--sizes", "1K,4K", "--rounds", "1", "--backends", "shm", "--algorithms", "native,ring"]
    done = subprocess.run([*BENCH, *words], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "hora: wrong sum of 1 KiB on 2 ranks with shm/ring: element 128 of call 0" in done.stderr
    assert "median" not in done.stdout


def ranks_of(process: subprocess.Popen, count: int) -> list[psutil.Process]:
    """The ranks below the command, by rank, when all of them are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = {}
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                found[each.environ().get("RANK")] = each
        ranks = [found.get(str(rank)) for rank in range(count)]
        if None not in ranks:
            return ranks
        time.sleep(0.05)
    raise AssertionError("the ranks were not started")


def test_ending_the_command_ends_its_ranks(tmp_path: Path) -> None:
    process = subprocess.Popen([*BENCH, "--rounds", "100000"], env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        ranks_of(process, 2)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM
        assert psutil.wait_procs(below, timeout=10)[1] == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--backends", "mpi"], 'hora: unknown backend "mpi"; choose from: shm, gloo, nccl\n'),
        (
            ["--sizes", "1X"],
            "hora: a size must be a number of bytes such as 4096, 64K, 4M or 1G, a multiple of 4 and at most 16 GiB, but is '1X'\n",
        ),
        (
            ["--algorithms", "tree"],
            'hora: unknown algorithm "tree"; choose from: native, ring, recursive_doubling, ordered, hierarchical, symmetric, auto\n',
        ),
        (
            ["--json", "/nowhere/rows.json"],
            "hora: --json cannot write /nowhere/rows.json; name a file in a directory that exists and may be written\n",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_starts(words, problem, capsys, monkeypatch) -> None:
    monkeypatch.setattr("hora.diag.wire.command.start_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["bench", "allreduce", *words]) == 2
    assert capsys.readouterr() == ("", problem)


def test_multicast_that_is_off_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setattr("hora.launch.host.count_gpus", lambda: 2)
    monkeypatch.setattr("hora.diag.wire.command.start_ranks", lambda *_: None)
    monkeypatch.setattr("hora.diag.wire.command.end_when_asked", lambda: None)
    assert main(["bench", "allreduce"]) == 0
    assert "\nNCCL_NVLS_ENABLE=0: NVLink multicast off\n" in capsys.readouterr().out


def test_help_lists_all_benches(capsys) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("allreduce", "data", "launch"))


def test_a_rank_that_is_killed_ends_the_command_with_its_name(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*BENCH, "--rounds", "100000", "--backends", "shm", "--algorithms", "native"],
        env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ranks = ranks_of(process, 2)
        ranks[1].kill()
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert "hora: rank 1 failed on " in shown
    assert "killed by SIGKILL" in shown
    assert "hora: the ranks have ended with exit code 137; what they said stands above" in shown
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
