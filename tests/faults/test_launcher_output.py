"""What ranks write is neither lost nor mixed, and a screen that is slow, or gone, or a full disk, disturbs nobody."""

import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launcher_kit import PROMISED_S, inherited_signals

LINES = 20_000
Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """`launch(body, *flags, **options)` starts a launcher whose ranks run `body`; it is killed when the test ends, and they with it."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(body: str, *flags: str, **options: object) -> subprocess.Popen[bytes]:
        script = tmp_path / "script.py"
        script.write_text("import os, signal, sys, time\nRANK = os.environ['RANK']\n" + body)
        # Not the width that whoever runs the tests has told them: the terminal's own counts.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environ = inherited | {"HORA_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "hora.launch", *flags, str(script)]
        with inherited_signals():
            started.append(subprocess.Popen(command, env=environ, **{"stdin": subprocess.DEVNULL} | options))  # type: ignore[call-overload]
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()


def logs(tmp_path: Path) -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in (tmp_path / "state" / "logs").glob("*/rank*.log")}


def wait_until_blocked(launcher: int) -> list[int]:
    """Waits until the ranks can write no more; returns their processes."""
    ranks = []
    while len(ranks) < 2:
        ranks = [child for child in psutil.Process(launcher).children() if "script.py" in " ".join(child.cmdline())]
    while not all("pipe" in Path(f"/proc/{rank.pid}/wchan").read_text() for rank in ranks):
        time.sleep(0.01)
    return [rank.pid for rank in ranks]


def test_a_slow_screen_loses_nothing(launch: Launch, tmp_path: Path) -> None:
    body = f"for index in range({LINES}):\n    print(index, 'x' * 40)\n"
    with launch(body, "-np", "2", stdout=subprocess.PIPE) as process:
        wait_until_blocked(process.pid)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    expected = b"".join(b"%d %s\n" % (index, b"x" * 40) for index in range(LINES))
    assert logs(tmp_path) == {"rank0": expected, "rank1": expected}
    for rank in (b"[0] ", b"[1] "):
        assert b"".join(line[4:] for line in shown.splitlines(keepends=True) if line.startswith(rank)) == expected


def test_the_launcher_stays_until_the_screen_has_taken_everything(launch: Launch, tmp_path: Path) -> None:
    """What the ranks leave in their pipes when they end is more than the screen's pipe holds."""
    ended = tmp_path / "ended"
    ended.mkdir()
    body = f"sys.stdout.write('x' * 99 + '\\n')\nprint(('x' * 99 + '\\n') * 600, end='')\nopen({str(ended)!r} + '/' + RANK, 'w').close()\n"
    with launch(body, "-np", "3", stdout=subprocess.PIPE) as process:
        while len(list(ended.iterdir())) < 3 or len(psutil.Process(process.pid).children()) > 1:
            assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        shown, _ = process.communicate(timeout=60)
    assert len(shown.splitlines()) == 3 * 601


def test_a_blocked_screen_does_not_keep_a_failed_job_alive(launch: Launch) -> None:
    with launch("while True:\n    print('x' * 100)\n", "-np", "2", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pids = wait_until_blocked(process.pid)
        begin = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() - begin < PROMISED_S
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 137
    assert b"failed" in errors


def test_ctrl_c_leaves_a_screen_that_is_stuck(launch: Launch) -> None:
    with launch("while True:\n    print('x' * 100)\n", "-np", "2", stdout=subprocess.PIPE) as process:
        pids = wait_until_blocked(process.pid)
        os.kill(pids[0], signal.SIGKILL)
        while any(psutil.pid_exists(pid) for pid in pids):
            pass
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 137


def test_a_screen_that_is_gone_does_not_end_the_job(launch: Launch, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = launch("for _ in range(1000):\n    print('x' * 100)\n", "-np", "2", stdout=writer)
    os.close(writer)
    assert process.wait(60) == 0
    assert {len(text) for text in logs(tmp_path).values()} == {101_000}


def test_streams_that_are_closed_from_the_start_disturb_nobody(launch: Launch, tmp_path: Path) -> None:
    """What ranks print must not reach whatever has got the numbers of those streams: a line's end is the number of SIGUSR1."""

    def close_all() -> None:
        for descriptor in range(3):
            os.close(descriptor)

    body = """
print(RANK, flush=True)
print(RANK, file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
if RANK == "0":
    open(os.environ["TMPDIR"] + "/printed", "x").close()
else:
    while not os.path.exists(os.environ["TMPDIR"] + "/printed"):  # what fails ends the others, before they have printed too
        time.sleep(0.01)
    sys.exit(3)
"""
    assert launch(body, "-np", "2", preexec_fn=close_all, close_fds=True).wait(60) == 3
    assert logs(tmp_path) == {"rank0": b"0\n0\n", "rank1": b"1\n1\n"}


def test_a_screen_that_was_made_non_blocking_loses_nothing(launch: Launch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = launch(f"for index in range({LINES}):\n    print(index, 'x' * 40)\n", "-np", "2", stdout=writer)
    os.close(writer)
    wait_until_blocked(process.pid)
    with os.fdopen(reader, "rb") as pipe:
        shown = pipe.read()
    assert process.wait(60) == 0
    assert len(shown.splitlines()) == 2 * LINES


def test_a_full_disk_under_the_logs_is_said_and_survived(launch: Launch, tmp_path: Path) -> None:
    """As it is met by whoever may write no more than so many bytes into a file."""
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, room[1]))
    try:
        process = launch(
            "print('x' * 5000 if RANK == '1' else '')\nprint('to the end')\n",
            "-np",
            "2",
            "--log-dir",
            str(tmp_path / "logs"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(line for line in shown.splitlines() if b"end" in line) == [b"[0] to the end", b"[1] to the end"]
    assert b"rank1.log cannot be written any more: File too large" in errors


def test_streams_are_kept_apart_and_bytes_untouched(launch: Launch, tmp_path: Path) -> None:
    body = "sys.stdout.buffer.write(b'caf\\xe9 ' + RANK.encode() + b'\\n')\nsys.stderr.buffer.write(b'\\xff\\xfe\\n')\n"
    process = launch(body, "-np", "2", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown, errors = process.communicate(timeout=60)
    assert sorted(shown.splitlines()) == [b"[0] caf\xe9 0", b"[1] caf\xe9 1"]
    assert sorted(errors.splitlines()) == [b"[0] \xff\xfe", b"[1] \xff\xfe"]
    for rank in (b"0", b"1"):
        assert sorted(logs(tmp_path)["rank" + rank.decode()].splitlines()) == [b"caf\xe9 " + rank, b"\xff\xfe"]


def test_one_rank_is_shown_as_if_it_ran_alone(launch: Launch) -> None:
    process = launch("sys.stdout.write('10%\\r20%\\rdone\\nno end')\n", stdout=subprocess.PIPE)
    shown, _ = process.communicate(timeout=60)
    assert shown == b"10%\r20%\rdone\nno end"


def test_quiet_shows_the_first_rank_and_logs_all(launch: Launch, tmp_path: Path) -> None:
    process = launch("print('hello', RANK)\n", "-np", "2", "--quiet", stdout=subprocess.PIPE)
    shown, _ = process.communicate(timeout=60)
    assert shown == b"[0] hello 0\n"
    assert logs(tmp_path) == {"rank0": b"hello 0\n", "rank1": b"hello 1\n"}


def test_standard_input_goes_to_rank_zero(launch: Launch) -> None:
    process = launch("print(repr(sys.stdin.read()))\n", "-np", "2", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    shown, _ = process.communicate(b"for rank 0", timeout=60)
    assert sorted(shown.splitlines()) == [b"[0] 'for rank 0'", b"[1] ''"]


def test_rank_zero_may_draw_on_the_terminal_while_others_print(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 sees a terminal as wide as its share; a line of rank 1 wipes the bar, whose next state stands on a line of its own."""
    body = (
        "def await_file(name):\n    while not os.path.exists(name):\n        time.sleep(0.01)\n"
        "if RANK == '0':\n"
        "    print(sys.stdout.isatty(), os.get_terminal_size().columns, flush=True)\n"
        "    sys.stdout.write('\\r 10%')\n    sys.stdout.flush()\n"
        "    await_file('printed')\n"
        "    sys.stdout.write('\\r100%\\n')\n"
        "else:\n"
        "    await_file('drawn')\n"
        "    print(sys.stdout.isatty(), flush=True)\n    signal.pause()\n"
    )
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 60))
    process = launch(body, "-np", "2", stdout=terminal, stderr=terminal, cwd=tmp_path)
    os.close(terminal)
    shown = b""
    for awaited, then in ((b"10%", "drawn"), (b"[1] False", "printed"), (b"100%", "")):
        while awaited not in shown:
            shown += read(controller)
        if then:
            (tmp_path / then).touch()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    os.close(controller)
    assert shown.startswith(b"[0] True 56\r\n")
    assert re.search(rb"\r\[0\]  10%\r\x1b\[K\[1\] False\r\n\r\[0\] 100%", shown), shown


def read(descriptor: int) -> bytes:
    assert select.select([descriptor], [], [], 60)[0]
    return os.read(descriptor, 4096)


@pytest.mark.parametrize("ending", ["ValueError", "SystemExit"])
def test_the_last_words_of_a_rank_are_in_the_report_whole(launch: Launch, ending: str) -> None:
    """The report waits for what the rank wrote last, however much it was."""
    body = f"if RANK == '1':\n    print('y' * 60_000)\n    raise {ending}('the end')\nsignal.pause()\n"
    process = launch(body, "-np", "2", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    report = errors[errors.index(b"hora: ") :]
    assert b"the end" in report
