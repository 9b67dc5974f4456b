"""What goes to other hosts and how: variables, commands, frames; and what is said when a host cannot be used."""

import json

import pytest

from hora import env
from hora.errors import ConfigError
from hora.launch import wire
from hora.launch.job_events import Finish, NodeLost
from hora.launch.report import explain_end
from hora.launch.rsh import agent_command, explain_failure
from hora.launch.travel import travelling


def test_what_steers_the_job_travels_and_nothing_else() -> None:
    stays = {
        "PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib", "CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "x",
        "HORA_TOKEN": "x", "TORCH_PASSWORD": "x", "NCCL_AUTH": "x", "PYTHONSTARTUP": "/rc", "SSH_AUTH_SOCK": "/s", "TMPDIR": "/t", "RANK": "1",
        env.JOB_DIR: "/tmp/j", env.KEY_FILE: "/tmp/k", env.RENDEZVOUS: "unix:///", env.LAUNCHER_PID: "1", env.NODE_RANK: "0",
    }  # fmt: skip
    goes = {
        env.TIMEOUT_S: "9", "NCCL_DEBUG": "INFO", "GLOO_X": "1", "OMP_NUM_THREADS": "2", "TORCH_LOGS": "x", "PYTORCH_CUDA_ALLOC_CONF": "x",
        "PYTHONPATH": "/lib with a space", "PYTHONHASHSEED": "0", "HOROVOD_CYCLE_TIME": "5", "NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "efa",
        "UCX_TLS": "rc", "RDMAV_FORK_SAFE": "1", "IBV_FORK_SAFE": "1", "MLX5_SINGLE_THREADED": "0",
    }  # fmt: skip
    assert travelling(stays | goes, same_python=True) == goes


def test_the_virtual_environment_goes_with_its_python() -> None:
    assert travelling({"VIRTUAL_ENV": "/venv"}, same_python=True) == {"VIRTUAL_ENV": "/venv"}
    assert travelling({"VIRTUAL_ENV": "/venv"}, same_python=False) == {}


def test_ssh_asks_nothing_and_takes_the_host_for_nothing_else() -> None:
    words = agent_command("me@host", rsh=None, python="/a b/python", environ={"PYTHONPATH": "/it's", "SECRET": "s3cret"})
    assert words[0] == "ssh"
    assert "BatchMode=yes" in words
    assert "-T" in words
    assert words[-3:-1] == ["--", "me@host"]
    assert words[-1] == """env 'PYTHONPATH=/it'"'"'s' '/a b/python' -u -m hora.launch.remote_agent"""
    assert "s3cret" not in " ".join(words)


def test_another_command_gets_host_and_words() -> None:
    assert agent_command("h", rsh="ip netns exec", python="py", environ={}) == [
        "ip",
        "netns",
        "exec",
        "h",
        "py",
        "-u",
        "-m",
        "hora.launch.remote_agent",
    ]
    assert agent_command("h", rsh="/opt/ssh -p 2222", python="py", environ={})[:4] == ["/opt/ssh", "-p", "2222", "-T"]


@pytest.mark.parametrize("rsh", ["", "'"])
def test_a_command_that_is_none_is_refused(rsh: str) -> None:
    with pytest.raises(ConfigError, match="--rsh must be a command"):
        agent_command("h", rsh=rsh, python="py", environ={})


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ssh: Could not resolve hostname h: Name or service not known", "its name is not known here"),
        ("Host key verification failed.", "connect once by hand (`ssh h`)"),
        ("me@h: Permission denied (publickey).", "`ssh-copy-id h`"),
        ("ssh: connect to host h port 22: Connection refused", "lets ssh in"),
        ("ssh: connect to host h port 22: No route to host", "see that it is up"),
        (
            "py: Error while finding module specification for 'hora.launch.x' (ModuleNotFoundError: No module named 'hora')",
            "lacks Hora",
        ),
        ("sh: 1: /bin/python: not found", "/bin/python is not there"),
        ("  File x\nSyntaxError: invalid syntax", "older than Python 3.11"),
        ("", "see that `ssh h true` works"),
    ],
)
def test_what_is_wrong_with_a_host_comes_with_a_remedy(said: str, remedy: str) -> None:
    text = explain_failure("h", exit_code=255, said=said, python="/bin/python", waited_s=60.0)
    assert text.startswith("h cannot be used (exit code 255)")
    assert remedy in text


def test_a_silent_host_is_named_with_the_deadline() -> None:
    assert explain_failure("h", exit_code=None, said="", python="py", waited_s=60.0).startswith("h did not answer within 60 s; ")


def test_the_loss_of_a_host_is_told_in_its_own_words() -> None:
    assert explain_end(Finish(1, NodeLost(3)), "host {} burns".format) == "host 3 burns"


@pytest.mark.parametrize("size_bytes", [1, 2, 7, 1000])
def test_frames_survive_in_pieces_of_any_size(size_bytes: int) -> None:
    sent = b"Welcome to the cluster\n" + wire.GREETING + wire.pack_message({"a": [1, "é\n"]})
    sent += wire.pack_output(70000, 2, b"\x00\xff\n") + wire.pack_output(0, 1, b"") + wire.pack_message({})
    decoder = wire.Decoder(wire.GREETING)
    frames = [frame for start in range(0, len(sent), size_bytes) for frame in decoder.feed(sent[start : start + size_bytes])]
    assert frames == [wire.Message({"a": [1, "é\n"]}), wire.Output(70000, 2, b"\x00\xff\n"), wire.Output(0, 1, b""), wire.Message({})]
    assert decoder.skipped == b"Welcome to the cluster\n"


@pytest.mark.parametrize("data", [b"hello world", b"M\xff\xff\xff\xff", b"X\0\0\0\0", b"O\0\0\0\x01x", b"M\0\0\0\x02[]", b"M\0\0\0\x01{"])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(wire.Decoder().feed(data))


def test_a_shell_that_talks_without_end_is_not_kept() -> None:
    decoder = wire.Decoder(wire.GREETING)
    for _ in range(100):
        assert list(decoder.feed(b"x" * 10_000)) == []
    assert len(decoder.skipped) <= 1 << 16
    assert list(decoder.feed(wire.GREETING + wire.pack_message({"a": 1}))) == [wire.Message({"a": 1})]


def test_messages_do_not_show_what_they_hold() -> None:
    assert "cafe" not in repr(wire.Message({"key": "cafe"}))


@pytest.mark.parametrize("word", ["plain", "two words", "'\"\\$(x)\n\t", "ä語", "\udcff\udc80"])
def test_arguments_survive_exactly(word: str) -> None:
    assert wire.from_text(json.loads(json.dumps(wire.as_text(word)))) == word
