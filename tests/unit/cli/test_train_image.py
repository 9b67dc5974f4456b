import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hora import log
from hora.cli.main import main
from hora.cli.train_image import ImageRequest, image, train_as_rank
from hora.errors import ConfigError
from hora.launch.options import LaunchOptions
from hora.launch.report_words import ReportWords
from hora.recipes.image.ranks_asked import Join, RankWords, Start, understand
from hora.recipes.image.scores import Score
from hora.recipes.meter import Tally


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The command writes its log to the standard error of its time, which pytest closes."""
    logger = log.get_logger()
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchOptions]:
    """What the launcher was asked for; nothing is started."""
    asked: list[LaunchOptions] = []

    def launch(options: LaunchOptions) -> int:
        asked.append(options)
        return 7

    monkeypatch.setattr("hora.launch.job.launch", launch)
    return asked


def settings_of(options: LaunchOptions) -> set[str]:
    return {options.args[place + 1] for place, word in enumerate(options.args) if word == "--set"}


def test_command_line_of_dream_system_starts_its_ranks(launched: list[LaunchOptions], tmp_path: Path) -> None:
    words = ["--nodes", "1", "--gpus", "2", "--nr", "0", "--epochs", "5", "--batch_size", "100", "--n_workers", "0", "--lr", "1e-4"]
    assert main(["train", "image", *words, "--run-dir", str(tmp_path)]) == 7
    (options,) = launched
    assert (options.nproc_per_node, options.num_nodes, options.node_rank, options.log_dir) == ("2", 1, 0, tmp_path / "logs")
    assert options.log_word == "--run-dir"
    assert settings_of(options) == {"epochs=5", "data.global_batch_size=100", "data.num_workers=0", "optimizer.lr=0.0001"}


def test_command_line_of_torch_dist_lab_is_understood(launched: list[LaunchOptions], tmp_path: Path) -> None:
    words = [
        "-d",
        "synthetic",
        "-a",
        "densenet",
        "--depth",
        "190",
        "--block-name",
        "Bottleneck",
        "--growthRate",
        "40",
        "--compressionRate",
        "2",
        "--drop",
        "0",
        "--train-batch",
        "64",
        "--test-batch",
        "100",
        "--epochs",
        "164",
        "--schedule",
        "81",
        "122",
        "--gamma",
        "0.1",
        "--momentum",
        "0.9",
        "--wd",
        "1e-4",
        "--manualSeed",
        "4",
        "-j",
        "4",
        "--nproc",
        "4",
    ]
    assert main(["train", "image", *words, "-c", str(tmp_path)]) == 7
    assert settings_of(launched[0]) == {
        "model.arch=densenet", "model.depth=190", "model.bottleneck=true", "model.growth_rate=40", "model.compression=2", "model.dropout=0.0",
        "data.global_batch_size=64", "data.eval_batch_size=100", "epochs=164", "schedule.kind=steps", "schedule.milestones=[81, 122]",
        "schedule.gamma=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.0001", "seed=4", "data.num_workers=4",
    }  # fmt: skip


@pytest.mark.parametrize(("arch", "name"), [("vgg", "vgg19"), ("vgg_bn", "vgg19_bn")])
def test_depth_of_vgg_is_a_part_of_its_name(arch: str, name: str, launched: list[LaunchOptions], tmp_path: Path) -> None:
    assert main(["train", "image", "-d", "synthetic", "-a", arch, "--depth", "19", "-c", str(tmp_path)]) == 7
    assert settings_of(launched[0]) == {f"model.arch={name}"}


def test_command_line_of_the_imagenet_example_starts_the_ranks_of_its_node(launched: list[LaunchOptions], tmp_path: Path) -> None:
    words = (
        "-a resnet18 --dist-url tcp://node0:23456 --dist-backend gloo --multiprocessing-distributed --world-size 2 --rank 1 --gpus 4 "
        f"--schedule 30 60 digits --run-dir {tmp_path}"
    ).split()
    assert main(["train", "image", *words]) == 7
    (options,) = launched
    assert (options.nproc_per_node, options.num_nodes, options.node_rank, options.master_addr, options.master_port) == (
        "4",
        2,
        1,
        "node0",
        23456,
    )
    assert options.args[options.args.index("--dist-backend") + 1] == "gloo"
    assert options.args[options.args.index("--data") + 1] == "digits"


def test_batch_counted_by_rank_is_that_of_all_ranks(launched: list[LaunchOptions]) -> None:
    assert main(["train", "image", "--batch-per-rank", "100", "--nproc", "3"]) == 7
    assert settings_of(launched[0]) == {"data.global_batch_size=300"}


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (RankWords(), Start(1)),
        (RankWords(nproc=3, nodes=2, node_rank=1, master_addr="a", master_port=5), Start(3, 2, 1, "a", 5)),
        (RankWords(multiprocessing_distributed=True), Start(None)),
        (RankWords(multiprocessing_distributed=True, world_size=1, rank=0, dist_url="env://"), Start(None)),
        (RankWords(world_size=4, rank=3, dist_url="tcp://[::1]:9"), Join(3, 4, "tcp://[::1]:9")),
        (RankWords(world_size=2, rank=1, dist_url="file:///x"), Join(1, 2, "file:///x")),
    ],
)
def test_words_that_go_together_are_understood(words: RankWords, asked: Start | Join) -> None:
    assert understand(words) == asked


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (RankWords(nodes=2), "--nr must say which of them this is.*--master-addr must give an address"),
        (RankWords(nodes=2, node_rank=2, master_addr="a"), "--nr must be from 0 to 1"),
        (RankWords(nodes=0), "--nodes must be at least 1"),
        (RankWords(nodes=2, node_rank=0, master_addr="a", world_size=2), "two ways of saying the same"),
        (RankWords(rank=1), "--world-size must be given with them"),
        (RankWords(dist_url="tcp://a:1"), "--world-size must be given with them"),
        (RankWords(world_size=2, dist_url="tcp://a:1"), "processes, without .* is 2, so --rank must say"),
        (RankWords(world_size=2, rank=2, dist_url="tcp://a:1"), "--rank must be from 0 to 1, less than --world-size"),
        (RankWords(world_size=2, rank=0), "--dist-url must say where they meet"),
        (
            RankWords(world_size=2, rank=0, dist_url="tcp://a:1", nproc=4),
            "add --multiprocessing-distributed, with which --world-size counts nodes",
        ),
        (RankWords(world_size=2, rank=0, multiprocessing_distributed=True, dist_url="env://"), "must be tcp://HOST:PORT"),
        (RankWords(world_size=2, rank=0, dist_url="tcp://224.66.41.62:23456"), "a multicast address"),
        (RankWords(world_size=2, rank=0, dist_url="tcp://a"), "must be tcp://HOST:PORT"),
        (RankWords(world_size=2, rank=0, dist_url="a:1"), "must begin with tcp://"),
    ],
)
def test_words_that_do_not_go_together_are_refused_with_the_reason(words: RankWords, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        understand(words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-d", "nowhere"], "nowhere must exist"),
        (["--config", "digit"], "did you mean digits"),
        (["-a", "vgg20"], "did you mean vgg1"),
        (["-a", "resnet", "--depth", "21"], "6n \\+ 2"),
        (["--set", "optimizer.lrr=1"], "did you mean `optimizer.lr`"),
        (["--set", "optimizer.lr=1", "--lr", "2"], "--set and another option give the same setting"),
        (["--batch-size", "10", "--batch-per-rank", "10"], "one of them must be left out"),
        (["digits", "-d", "mnist"], "DATA is given twice"),
        (["--gpu", "1", "--nproc", "2"], "--gpu is for one process"),
        (["--nproc", "9", "--exact"], "9 ranks are more than logical_ranks = 8"),
        (["--nproc", "3", "--batch-size", "2"], "3 ranks are more than data.global_batch_size = 2"),
        (["--resume"], "give its directory with --run-dir"),
        (["--evaluate"], "--evaluate must be told whose weights"),
        (["--resume", "--run-dir", "x", "--init-from", "y"], "leave one out"),
        (["--resume", "--run-dir", "x"], "nothing to resume from in x"),
        (["--json", "absent/x.json"], "--json cannot write absent/x.json"),
        (["--json", "."], "--json cannot write ."),
        (["--init-from", "absent"], "there is no absent"),
        (["--schedule", "0"], "schedule.milestones"),
        (["--run-dir", ""], "--run-dir.*must not be empty"),
        (["-d", ""], "--data.*must not be empty"),
        ([""], "DATA.*must not be empty"),
        (["--config", ""], "--config.*must not be empty"),
    ],
)
def test_mistake_is_told_before_anything_is_started(
    words: list[str], reason: str, launched: list[LaunchOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "image", *words]) in (1, 2)
    assert re.search(reason, capsys.readouterr().err)
    assert launched == []


REQUEST = ImageRequest(
    config="digits", data="a folder", overrides=("a.b=c d", "e=f"), run_dir=Path("runs/x"), resume=True, evaluate=True, exact=True,
    init_from=Path("w.safetensors"), allow_torch_file=True, device="cpu", backend="gloo", json_file=Path("rows.json"),
    at_end=ReportWords(report=True, report_json=Path("report.json"), trace=Path("trace.json")),
)  # fmt: skip


@pytest.mark.parametrize("request_", [ImageRequest(), REQUEST, replace(REQUEST, device="cuda:1")])
def test_request_survives_being_written_as_words(request_: ImageRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ImageRequest] = []
    monkeypatch.setattr("hora.cli.train_image.train_as_rank", lambda request, *_: found.append(request) or 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(request_.words()) == 0
    assert found == [request_]


def test_what_is_evaluated_is_written_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Score(Tally(0.5, 4), 3, 4)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which the command sets
    monkeypatch.setattr("hora.recipes.image.recipe.evaluate", lambda *_, **__: score)
    rows = tmp_path / "rows.json"
    (tmp_path / "weights").touch()
    assert train_as_rank(ImageRequest(evaluate=True, init_from=tmp_path / "weights", device="cpu", json_file=rows)) == 0
    found = {row["what"]: (row["value"], row["samples"]) for row in json.loads(rows.read_text())}
    assert found == {"image/digits/test accuracy": (0.75, [0.75]), "image/digits/test accuracy among five": (1, [1])}


def test_process_that_is_started_by_hand_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr("hora.cli.train_image.train_as_rank", lambda *words: found.append(words) or 0)
    assert main(["train", "image", "--world-size", "2", "--rank", "1", "--dist-url", "tcp://a:9", "--batch-per-rank", "8"]) == 0
    ((request, asked),) = found
    assert asked == Join(1, 2, "tcp://a:9")
    assert request.overrides == ("data.global_batch_size=16",)


def test_rank_of_another_launcher_starts_no_others(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found: list[Any] = []
    monkeypatch.setattr("hora.cli.train_image.train_as_rank", lambda *words: found.append(words) or 0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", "image", "--nodes", "2", "--nr", "0", "--master-addr", "a"]) == 2
    assert "is a rank already, by the variables of env" in capsys.readouterr().err
    assert main(["train", "image", "--dist-url", "env://", "--batch-per-rank", "5"]) == 0
    assert found[0][0].overrides == ("data.global_batch_size=20",)


def test_every_word_says_what_it_means() -> None:
    words = {name for option in image.params for name in option.opts if name.startswith("--")}
    assert {"--world-size", "--rank", "--dist-url", "--dist-backend", "--multiprocessing-distributed", "--nodes", "--nr", "--gpus"} <= words
    assert [option.name for option in image.params if option.param_type_name == "option" and not getattr(option, "help", None)] == []


def test_looking_at_words_takes_neither_torch_nor_numpy() -> None:
    script = "from hora.cli.main import main; main(['train', 'image', '--nproc', '99']); import sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "99 ranks are more than" in done.stderr
