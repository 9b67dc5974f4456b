from pathlib import Path
from typing import Any

import pytest

from hora.cli.main import main
from hora.cli.train_nmt import NmtRequest, nmt
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
    monkeypatch.setattr("hora.log.configure", lambda **_: None)  # whose stream would be one of capsys
    return asked


def test_words_of_njunmt_say_where_things_go(launched: list[LaunchOptions], tmp_path: Path) -> None:
    save, log = str(tmp_path / "save"), str(tmp_path / "log")
    words = ["--model_name", "a", "--saveto", save, "--log_path", log, "--shared_dir", "/tmp", "--valid_path", "v"]
    flags = ["--reload", "--use_gpu", "--debug", "--predefined_config", "small", "--config_path", "demo", "--nproc", "2"]
    assert main(["train", "nmt", *words, *flags]) == 7
    (options,) = launched
    assert (options.nproc, options.log_dir, options.shared_dir) == (2, tmp_path / "log", Path("/tmp"))
    assert (options.target, options.kind) == ("hora.cli.main", "module")
    args = " ".join(options.args)
    assert args.startswith("train nmt ")
    for part in (f"--run-dir {save}/a", "--valid-path v", "--reload", "--use-gpu", "--debug", "--predefined-config small"):
        assert part in args


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--run-dir", "a", "--saveto", "b"], "--run-dir"),
        (["--saveto", "b"], "--saveto"),
        (["--saveto", "b", "--log_path", "c"], "--log-path"),
    ],
)
def test_advice_on_logs_names_what_says_where_they_go(words: list[str], named: str, launched: list[LaunchOptions]) -> None:
    assert main(["train", "nmt", "--config", "demo", *words]) == 7
    assert launched[0].log_word == named


def test_run_without_a_name_is_called_after_its_configuration_and_the_time(launched: list[LaunchOptions]) -> None:
    main(["train", "nmt", "--config", "demo"])
    args = launched[0].args
    assert args[args.index("--run-dir") + 1].startswith("runs/nmt-demo-")


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        ([], 2, "--config must say what to train"),
        (["--config", "demo", "--set", "training_configs.batch_sise=3"], 2, "did you mean `training_configs.batch_size`?"),
        (["--config", "demo", "--set", "data_configs.valid_data=[gone, away]"], 2, "away is not there"),
        (["--config", "demo", "--pretrain_path", "gone"], 2, "--pretrain_path must name a file or a checkpoint, but there is no gone"),
        (["--config", "demo", "--init-from", "a", "--pretrain_path", "b"], 2, "weights of one place"),
        (["--config", "demo", "--resume"], 1, "nothing to resume from in runs/demo"),
        (["--config", "demo", "--use_gpu", "--device", "cpu"], 2, "contradict each other"),
        (["--config", "demo", "--nproc", "9", "--exact"], 2, "--nproc 9 is more than"),
    ],
)
def test_mistakes_are_told_before_a_rank_is_started(
    words: list[str], code: int, fault: str, launched: list[LaunchOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "nmt", *words]) == code
    assert fault in capsys.readouterr().err
    assert not launched


def test_reload_goes_on_with_a_run_that_has_a_checkpoint_and_with_no_other(tmp_path: Path) -> None:
    request = NmtRequest(config="demo", reload=True, run_dir=tmp_path)
    assert not request.resumes
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints").mkdir()
    assert not request.resumes
    (tmp_path / "checkpoints" / "step-00000001.g0").mkdir()
    assert request.resumes


def test_run_that_goes_on_with_its_own_configuration_is_called_after_its_directory() -> None:
    assert NmtRequest(resume=True, run_dir=Path("runs/x")).name == "x"
    assert NmtRequest(config="demo", resume=True, run_dir=Path("runs/x")).name == "demo"
    assert NmtRequest(model_name="a", resume=True, run_dir=Path("runs/x")).name == "a"


REQUEST = NmtRequest(
    config="a", predefined_config="b", data=Path("a folder"), overrides=("a.b=c d", "e=f"), run_dir=Path("runs/x"), valid_path=Path("v"),
    resume=True, reload=True, exact=True, init_from=Path("w.safetensors"), pretrain_path=Path("p"), allow_torch_file=True, device="cpu", use_gpu=True,
    debug=True, model_name="n", json_file=Path("rows.json"),
    at_end=ReportWords(report=True, report_json=Path("report.json"), trace=Path("trace.json")),
)  # fmt: skip


@pytest.mark.parametrize("request_", [NmtRequest(run_dir=Path("runs/y")), REQUEST])
def test_request_survives_being_written_as_words(request_: NmtRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(nmt, "callback", lambda **options: found.append(options))
    main(request_.words())
    at_end = ReportWords.take(found[0])
    assert NmtRequest(at_end=at_end, **found[0]) == request_
