"""From the user's words to the command of a rank."""

import sys
from pathlib import Path

import pytest

from hora.errors import ConfigError
from hora.launch.target import rank_command


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*words: str) -> list[str]:
    return [sys.executable, "-u", *words]


def test_a_script_runs_under_this_python_with_its_arguments_untouched(here: Path) -> None:
    (here / "train.py").touch()
    args = ["--name=a b", "", "'\"$(x)", "--", "-np", "\n"]
    assert rank_command("train.py", args, "script") == python("train.py", *args)


def test_a_file_without_an_ending_is_a_script(here: Path) -> None:
    (here / "train").touch()
    assert rank_command("train", [], "script") == python("train")


def test_a_folder_with_a_main_is_a_script(here: Path) -> None:
    (here / "app").mkdir()
    (here / "app" / "__main__.py").touch()
    assert rank_command("app", [], "script") == python("app")


def test_a_file_that_looks_like_an_option_is_no_option(here: Path) -> None:
    (here / "-c.py").touch()
    assert rank_command("-c.py", [], "script") == python("./-c.py")


def test_a_bare_name_is_a_module(here: Path) -> None:
    (here / "package").mkdir()
    (here / "package" / "__init__.py").touch()
    assert rank_command("package.train", ["x"], "script") == python("-m", "package.train", "x")
    assert rank_command("json.tool", [], "module") == python("-m", "json.tool")
    assert rank_command("sys", [], "module") == python("-m", "sys")


def test_a_module_is_found_along_pythonpath(here: Path) -> None:
    (here / "lib").mkdir()
    (here / "lib" / "mine.py").touch()
    assert rank_command("mine", [], "script", {"PYTHONPATH": f"/nowhere:{here}/lib"}) == python("-m", "mine")


def test_a_module_is_not_imported_by_looking(here: Path) -> None:
    (here / "loud.py").write_text("raise SystemExit('imported')")
    rank_command("loud", [], "module")
    assert "loud" not in sys.modules


def test_a_program_runs_as_it_is(here: Path) -> None:
    (here / "program").write_text("#!/bin/sh\n")
    (here / "program").chmod(0o755)
    assert rank_command("./program", ["x"], "program") == ["./program", "x"]
    assert rank_command("sh", ["-c", "true"], "program")[0].endswith("/sh")


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        ("missing.py", "script", "there is no script 'missing.py'"),
        ("trian", "script", "'trian' is neither a file nor a module"),
        ("no.such", "module", "there is no module 'no.such'"),
        ("a;b", "script", "'a;b' is neither a file nor a module"),
        ("-c", "script", "'-c' is neither a file nor a module"),
        ("folder", "script", "without a __main__.py"),
        ("dangling.py", "script", "there is no script 'dangling.py'"),
        ("no-such-program", "program", "there is no program 'no-such-program' in PATH"),
        ("./plain", "program", "is not executable; run `chmod"),
    ],
)
def test_what_cannot_run_is_refused(here: Path, target: str, kind: str, message: str) -> None:
    (here / "folder").mkdir()
    (here / "plain").touch()
    (here / "dangling.py").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=message):
        rank_command(target, [], kind)  # type: ignore[arg-type]
