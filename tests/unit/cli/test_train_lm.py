import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hora.cli.main import main
from hora.cli.train_lm import LmRequest, lm
from hora.launch.options import LaunchOptions
from hora.launch.report_words import ReportWords


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """What the launcher was asked for; nothing is started."""
    asked: list[LaunchOptions] = []

    def launch(options: LaunchOptions) -> int:
        asked.append(options)
        return 7

    monkeypatch.setattr("hora.launch.job.launch", launch)
    return asked


def test_ranks_are_started_with_the_same_words_and_logs_in_the_run_directory(launched: list[LaunchOptions], tmp_path: Path) -> None:
    words = ["--config", "config_small", "--data_path", "excerpt", "--nproc", "3", "--set", "epochs=1", "--run-dir", str(tmp_path)]
    assert main(["train", "lm", *words]) == 7
    (options,) = launched
    assert (options.nproc, options.log_dir) == (3, tmp_path / "logs")
    assert (options.target, options.kind) == ("hora.cli.main", "module")
    assert options.args[:2] == ("train", "lm")
    assert "--resume" not in options.args


def test_a_file_in_the_place_of_the_run_directory_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["train", "lm", "--config", "demo", "--run-dir", "file"]
    done = subprocess.run([sys.executable, "-m", "hora", *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "hora: the log directory file/logs cannot be made: Not a directory; name another with --run-dir\n",
    )


def test_run_directory_is_chosen_once_for_all_ranks(launched: list[LaunchOptions]) -> None:
    main(["train", "lm", "--config", "demo"])
    args = launched[0].args
    assert args[args.index("--run-dir") + 1].startswith("runs/lm-demo-")


def test_run_that_goes_on_with_its_own_configuration_is_called_after_its_directory() -> None:
    assert LmRequest(config="config_medium").name == LmRequest(config="medium", resume=True, run_dir=Path("runs/x")).name == "medium"
    assert LmRequest(resume=True, run_dir=Path("runs/x")).name == "x"
    assert LmRequest().name == "small"


REQUEST = LmRequest(
    config="small", data="a folder", overrides=("a.b=c d", "e=f"), nproc=2, run_dir=Path("runs/x"), resume=True,
    exact=True, init_from=Path("w.safetensors"), allow_torch_file=True, device="cpu", json_file=Path("rows.json"),
    at_end=ReportWords(report=True, report_json=Path("report.json"), trace=Path("trace.json")),
)  # fmt: skip


@pytest.mark.parametrize("request_", [LmRequest(), REQUEST])
def test_request_survives_being_written_as_words(request_: LmRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(lm, "callback", lambda **options: found.append(options))
    main(request_.words())
    at_end = ReportWords.take(found[0])
    assert LmRequest(at_end=at_end, **found[0]) == request_


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nowhere"], "nowhere must exist"),
        (["--config", "smal"], "did you mean small"),
        (["--data", "excerpt", "--set", "optimizer.lrr=1"], "did you mean `optimizer.lr`"),
        (["--data", "excerpt", "--nproc", "21"], "--nproc 21 is more than data.rows = 20"),
        (["--resume"], "give its directory with --run-dir"),
        (["--resume", "--run-dir", "x", "--init-from", "y"], "leave one out"),
        ([], "data.path must be a directory"),
    ],
)  # fmt: skip
def test_mistake_is_told_before_anything_is_started(
    words: list[str], message: str, launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "lm", *words]) == 2
    assert message in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--json", "absent/x.json"], "--json cannot write absent/x.json"),
        (["--json", "."], "--json cannot write ."),
        (["--init-from", "absent.safetensors"], "there is no absent.safetensors"),
        (["--resume", "--run-dir", "."], "nothing to resume from"),
        (["--set", "seed=99999999999999999999999"], "seed"),
        (["--exact", "--nproc", "9"], "more than logical_ranks = 8"),
        (["--exact", "--set", "logical_ranks=21"], "more than data.rows = 20"),
    ],
)
def test_mistake_that_would_show_late_is_told_before_anything_is_started(
    words: list[str], reason: str, launched: list[LaunchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "lm", *([] if "--resume" in words else ["--data", "excerpt"]), *words]) not in (0, 7)
    assert not launched
    assert reason in capsys.readouterr().err


def test_resuming_a_run_that_is_not_there_starts_nothing(launched: list[LaunchOptions], tmp_path: Path) -> None:
    assert main(["train", "lm", "--data", "excerpt", "--resume", "--run-dir", str(tmp_path / "none")]) == 1
    assert launched == []
    assert not (tmp_path / "none").exists()


def test_looking_at_configuration_and_data_takes_no_torch() -> None:
    call = "from hora.cli.main import main; main(['train', 'lm', '--data', 'excerpt', '--nproc', '99'])"
    script = f"{call}; import sys; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "--nproc 99" in done.stderr
