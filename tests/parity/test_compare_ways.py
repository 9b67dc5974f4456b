"""The plain loops of `hora compare` serve the recipes' trainers as `TrainStep` does, and train the same where they are meant to."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import hora
from hora import events
from hora.compare import __main__ as rank
from hora.compare import ways
from hora.compare.plain import HorovodStep
from hora.compare.request import Request
from hora.compare.subjects import load
from hora.recipes.nmt.texts import EXCERPT
from hora.testing import run_ranks

LM = ("model.hidden_size=16", "data.rows=8", "data.window=5", "data.micro_batch_size=2", "optimizer.clip_norm=0.5")
NMT = (
    "data_configs.lang_pair=en-de", "model_configs.d_model=16", "model_configs.d_word_vec=16", "model_configs.d_inner_hid=16",
    "optimizer_configs.scheduler_configs.warmup_steps=1",
    "model_configs.n_layers=1", "model_configs.n_head=2", "training_configs.batching_key=tokens", "training_configs.batch_size=60",
)  # fmt: skip
IMAGE = ("data.global_batch_size=5", "data.synthetic.samples=21", "data.synthetic.size=16", "optimizer.clip_norm=1.0", "model.arch=lenet")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    for index, split in enumerate(("train", "valid")):
        for language in ("en", "de"):
            lines = (EXCERPT / f"train.{language}").read_text(encoding="utf-8").split("\n")[40 * index :][:40]
            (directory / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for split in ("train", "valid", "test"):
        (directory / f"{split}.txt").write_text((directory / "train.en").read_text(encoding="utf-8") * 2, encoding="utf-8")
    return directory


def losses(recipe: str, data: str, overrides: tuple[str, ...], variants: list[str]) -> dict[str, list[float]]:
    config = {"image": "mnist", "lm": "demo", "nmt": "demo"}[recipe]
    request = Request(recipe, config, data, overrides, tuple(variants), hora.world_size(), 8, 1, False, 1, False)
    subject = load(recipe, (config, data, overrides), dropout=False)
    with events.observe(events.Observer()):  # what is recorded ends here, and not with the job
        trained = [rank.train(variant, subject, request) for variant in variants]
    assert all(len(one.seconds) == len(one.losses) == len(request.stretches()) for one in trained)
    assert all((one.waiting is None) == (hora.world_size() == 1) for one in trained)
    return {one.variant: [*one.losses, one.loss] for one in trained}


def words_of(recipe: str, texts: Path, *, even: bool) -> tuple[str, str, tuple[str, ...]]:
    if recipe == "image":
        return recipe, "synthetic", IMAGE + (("data.global_batch_size=4", "data.drop_last=true") if even else ())
    return recipe, str(texts), LM if recipe == "lm" else NMT


@pytest.mark.parametrize("recipe", ["image", "lm", "nmt"])
@run_ranks(1, 2)
def test_ways_train_the_same(recipe: str, texts: Path, world_size: int) -> None:
    mine = ["single", "twin"] if world_size == 1 else ["per-parameter", "deferred"]
    found = losses(*words_of(recipe, texts, even=False), ["overlap", *mine])
    for variant in mine:
        assert found[variant] == pytest.approx(found["overlap"], rel=2e-5), variant


@pytest.mark.parametrize(("recipe", "even"), [("image", True), ("image", False), ("lm", True), ("nmt", False)])
@run_ranks(2)
def test_means_of_ranks_are_the_mean_of_all_where_counts_are_equal(recipe: str, even: bool, texts: Path) -> None:
    found = losses(*words_of(recipe, texts, even=even), ["overlap", "ddp"])
    apart = max(abs(one - other) / other for one, other in zip(found["ddp"], found["overlap"], strict=True))
    assert (apart < 2e-5) if even else (1e-4 < apart < 0.5)


@run_ranks(2)
def test_horovods_optimizer_is_driven_as_its_documentation_says(texts: Path) -> None:
    """With Hora's own `horovod.torch`, which behaves as Horovod's."""
    import hora.hvd as hvd

    hvd.init()  # joins the session that is there
    plain = ways._plain(partial(HorovodStep, hvd=hvd))
    real, rank.step_maker = rank.step_maker, lambda *_: nullcontext(plain)
    try:
        by_hvd = losses(*words_of("lm", texts, even=True), ["horovod"])["horovod"]
    finally:
        rank.step_maker = real
        hvd.shutdown()
    assert by_hvd == pytest.approx(losses(*words_of("lm", texts, even=True), ["per-parameter"])["per-parameter"], rel=2e-5)
