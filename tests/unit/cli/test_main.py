"""The `hora` command: its subcommands, found when they are called."""

import errno
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import click
import pytest

import hora
import hora.cli
from hora.cli.main import COMMANDS, command, main
from hora.errors import ConfigError, HoraError
from hora.exits import WRONG


def test_every_command_has_its_module_and_every_module_its_command() -> None:
    others = {"main", "horarun", "recipe_job", "train_image", "train_lm", "train_nmt"}  # commands of their own, and of `hora train`
    modules = {module.name for module in pkgutil.iter_modules(hora.cli.__path__)} - others
    assert modules == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"hora {name}" in capsys.readouterr().out.split("\n", 1)[1]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert hora.__version__ in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown and summary in shown for name, summary in COMMANDS.items())


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "Commands:" in shown.out + shown.err


@pytest.mark.parametrize(
    ("name", "advice"), [("rnu", "did you mean 'run'?"), ("trian", "did you mean 'train'?"), ("xyzzy", "choose one of: run, train")]
)
def test_an_unknown_command_names_the_nearest(name: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    said = capsys.readouterr().err
    assert f"unknown command {name!r}; {advice}" in said


def test_commands_are_imported_when_they_are_called() -> None:
    program = (
        "import json, sys\nfrom hora.cli.main import main\nmain(['--help'])\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('hora.cli.') or name in ('torch', 'numpy', 'rich')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == ["hora.cli.main"]


@pytest.mark.parametrize(("error", "code"), [(ConfigError("wrong"), 2), (HoraError("broken"), 1)])
def test_an_error_of_horas_is_one_sentence(
    error: HoraError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(type(command), "get_command", lambda *_: failing)
    assert main(["run"]) == code
    assert capsys.readouterr().err == f"hora: {error}\n"


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (75, 75)])
def test_the_exit_code_is_the_commands(result: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(command), "get_command", lambda *_: click.Command("run", callback=lambda: result))
    assert main(["run"]) == code


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(command), "get_command", lambda *_: click.Command("run", callback=interrupt))
    assert main(["run"]) == 130


def test_an_error_that_is_not_horas_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(command), "get_command", lambda *_: click.Command("run", callback=fail))
    with pytest.raises(ZeroDivisionError):
        main(["run"])


@pytest.mark.parametrize("words", [["vocab", "--file"], ["ring", "--json"], ["checkpoint", "show"], ["train", "image"]], ids=" ".join)
def test_a_name_that_is_too_long_for_a_file_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "x" * 300]) == WRONG
    said = capsys.readouterr().err
    assert said.startswith("hora: ")
    assert "File name too long" in said
    assert said.count("\n") == 1


def test_a_file_that_this_user_may_not_look_at_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def look() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "closed/words")  # which root never meets

    monkeypatch.setattr(type(command), "get_command", lambda *_: click.Command("run", callback=look))
    assert main(["run"]) == WRONG
    assert (
        capsys.readouterr().err == "hora: closed/words cannot be used: Permission denied; check the name, and what this user may do there\n"
    )


def test_a_directory_that_was_removed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(["run", "train.py"]) == WRONG
    assert capsys.readouterr().err.startswith("hora: the directory that this was started in is there no more; ")


def test_other_errors_of_a_file_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "somewhere")

    monkeypatch.setattr(type(command), "get_command", lambda *_: click.Command("run", callback=fail))
    with pytest.raises(OSError, match="Input/output error"):
        main(["run"])


def test_what_an_encoding_lacks_is_shown_escaped() -> None:
    program = "import click, sys\nfrom hora.launch.console import run_command\nsys.argv = ['x']\n"
    program += "sys.exit(run_command(click.Command('x', callback=lambda: print('caf\\u00e9')), name='x'))\n"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    result = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (0, b"caf\\xe9\n"), result.stderr


def test_a_process_that_is_about_to_end_keeps_its_exit_code_when_it_is_asked_to_end() -> None:
    """As by a scheduler that sends SIGTERM again, to a launcher whose ranks have saved."""
    program = """
import atexit, os, signal, sys
import click
from hora.launch.console import run_command
atexit.register(lambda: [os.kill(os.getpid(), signum) for signum in (signal.SIGTERM, signal.SIGHUP)])
sys.argv = ["x"]
sys.exit(run_command(click.Command("x", callback=lambda: 75), name="x"))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 75


def _full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def _unread() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w", encoding="utf-8")


@pytest.mark.parametrize(("opened", "reason"), [(_full, "No space left on device"), (_unread, "Broken pipe")])
@pytest.mark.parametrize(
    "say",
    [lambda: click.echo("said"), lambda: sys.stdout.write("kept"), lambda: sys.stdout.buffer.write(b"x" * 100_000)],
    ids=["at once", "at the end", "as bytes"],
)
def test_standard_output_that_takes_no_more_is_one_sentence(
    opened: Callable[[], TextIO],
    reason: str,
    say: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def saying() -> None:
        say()

    monkeypatch.setattr(type(command), "get_command", lambda *_: click.Command("run", callback=saying))
    with opened() as output:  # closing it fails if anything is left to write
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["run"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err.startswith(f"hora: cannot write standard output: {reason}; ")


def test_a_command_whose_output_is_refused_ends_with_one_line() -> None:
    with _full() as output:
        done = subprocess.run([sys.executable, "-m", "hora", "--help"], stdout=output, stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(b"hora: cannot write standard output: No space left on device; ")
    assert done.stderr.count(b"\n") == 1


def test_the_script_hora_is_installed() -> None:
    done = subprocess.run([str(Path(sys.executable).parent / "hora"), "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert hora.__version__ in done.stdout
    assert importlib.util.find_spec("hora.__main__") is not None
