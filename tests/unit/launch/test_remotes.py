"""The launcher's end of remote shells, at whose other end are programs that are no agents."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from hora.errors import ConfigError, LaunchError
from hora.launch import wire
from hora.launch.lines import Hidden
from hora.launch.remote import Link, Remote
from hora.launch.remotes import Remotes
from hora.launch.sinks import NoLog, Screen, Sink, Tail

Add = Callable[[str], Remote]
ANSWERING = "import sys; sys.stdout.buffer.write({!r}); sys.stdout.flush(); sys.stdin.read()"


@pytest.fixture
def remotes() -> Iterator[Remotes]:
    with Remotes() as remotes:
        yield remotes


@pytest.fixture
def add(remotes: Remotes) -> Add:
    """`add(program)` adds a host, "h0" and so on, whose agent is a Python program."""

    def add(program: str) -> Remote:
        number = len(remotes.nodes)
        remotes.add(number, Remote(f"h{number}", [sys.executable, "-S", "-c", program], "python"))
        return remotes._remotes[number]

    return add


def answering(**fields: object) -> str:
    return ANSWERING.format(b"motd\n" + wire.GREETING + wire.pack_message(fields))


def test_all_are_asked_and_answer(remotes: Remotes, add: Add) -> None:
    add(answering(a=1))
    add(answering(a=2))
    assert remotes.ask({0: {}, 1: {}}, 60.0) == {0: {"a": 1}, 1: {"a": 2}}


def test_a_question_longer_than_a_pipe_is_asked(remotes: Remotes, add: Add) -> None:
    add("import sys; n = len(sys.stdin.buffer.read(3000000)); " + ANSWERING.format(wire.GREETING + wire.pack_message({"a": 1})))
    assert remotes.ask({0: {"long": "x" * 3_000_000}}, 60.0) == {0: {"a": 1}}


def test_refusals_are_named_together(remotes: Remotes, add: Add) -> None:
    add(answering(refused="no script", config=True))
    add(answering(a=1))
    add(answering(refused="no directory", config=True))
    with pytest.raises(ConfigError, match=r"h0: no script\n *h2: no directory$"):
        remotes.ask({0: {}, 1: {}, 2: {}}, 60.0)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", r"h0 cannot be used \(exit code 3\); "),
        ("import sys; sys.exit('ssh: Connection refused')", r"\(exit code 1\): ssh: Connection refused; see that it is up"),
        (ANSWERING.format(wire.GREETING + b"nonsense that is no frame"), "no frame of an agent"),
        ("import time; time.sleep(600)", "h0 did not answer within 0.5 s"),
        ("import os, time; os.close(1); time.sleep(600)", "h0 did not answer within 0.5 s"),
    ],
)
def test_what_is_no_agent_is_named(remotes: Remotes, add: Add, program: str, said: str) -> None:
    add(program)
    with pytest.raises(LaunchError, match=said):
        remotes.ask({0: {}}, 0.5 if "sleep" in program else 60.0)


def test_none_is_left_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Remotes() as remotes:
        stubborn = Remote(
            "h", [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"], "python"
        )
        remotes.add(0, stubborn)
    assert stubborn.ended
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_command_that_is_not_there_is_named() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="'/no/such/ssh' cannot be started: No such file or directory; .* with --rsh"):
        Remote("h", ["/no/such/ssh", "h"], "python")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("data", [wire.pack_output(7, 1, b"x"), wire.pack_output(0, 3, b"x"), b"no frame at all"])
def test_an_agent_that_says_what_none_would_say_is_given_up(remotes: Remotes, add: Add, data: bytes) -> None:
    remote = add(answering(a=1))
    remotes.ask({0: {}}, 60.0)
    tail = Tail(100)
    link = Link(remote, {(0, 1): Sink(tail, Hidden(), Screen(1, [])), (0, 2): Sink(NoLog(), Hidden(), Screen(2, []))}, lambda: None)
    link.take(wire.pack_output(0, 1, b"fine"), 0.0)
    link.take(data, 0.0)
    link.take(wire.pack_output(0, 1, b"ignored"), 0.0)
    link.end()
    assert tail.tail(100) == b"fine"
    assert [event.node for event in remotes.reap()] == [0]
    assert list(remotes.reap()) == []
    assert "h0: its agent must speak as this launcher does" in remotes.explain_loss(0)
    remote._process.wait(20)
    os.close(link.descriptor)
    os.close(remote.errors)


def test_an_agent_that_is_done_is_not_lost(remotes: Remotes, add: Add) -> None:
    remote = add(answering(a=1))
    remotes.ask({0: {}}, 60.0)
    link = Link(remote, {}, lambda: None)
    assert remotes.pending()
    link.take(wire.pack_message({"ended": 0}), 0.0)
    link.end()
    assert not remotes.pending()
    assert list(remotes.reap()) == []
    os.kill(remote.pid, signal.SIGKILL)
    os.close(link.descriptor)
    os.close(remote.errors)
