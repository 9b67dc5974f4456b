import math

import pytest

from hora.diag.steps.command import require_right, rows_of, with_origin
from hora.diag.steps.picture import draw
from hora.diag.steps.request import VARIANTS, WORKLOADS, Request, resolve
from hora.errors import ConfigError, HoraError

WORDS = {"workloads": None, "variants": None, "ranks": None, "rounds": 3, "steps": 2, "tiny": False}


def test_without_words_all_is_measured_that_the_machine_can_do():
    on_cpu, on_gpus = resolve(**WORDS, num_gpus=0), resolve(**WORDS, num_gpus=4)
    assert (on_cpu.workloads, on_cpu.ranks, on_cpu.on_gpus) == (("lstm_small", "mlp"), 2, False)
    assert (on_gpus.workloads, on_gpus.variants, on_gpus.ranks) == (tuple(WORKLOADS), tuple(VARIANTS), 4)
    assert "train-step" not in on_cpu.variants
    assert Request.parse(on_gpus.dump()) == on_gpus


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"workloads": "lstm"}, 'unknown workload "lstm"; choose from: lstm_small'),
        ({"variants": "ddp,best"}, 'unknown variant "best"; choose from: single'),
        ({"variants": "ddp,train-step"}, "variant train-step needs a GPU, but this machine shows none"),
    ],
)
def test_mistakes_are_named(words, problem):
    with pytest.raises(ConfigError, match=problem):
        resolve(**WORDS | words, num_gpus=0)
    with pytest.raises(ConfigError, match="3 ranks are asked for and 2 GPUs are here"):
        resolve(**WORDS | {"ranks": 3}, num_gpus=2)


def test_a_backend_is_chosen_on_cpus_alone():
    assert Request.parse(resolve(**WORDS, num_gpus=0, backend="gloo").dump()).backend == "gloo"
    with pytest.raises(ConfigError, match="--backend is for CPUs, but this machine has 2 GPUs"):
        resolve(**WORDS, num_gpus=2, backend="gloo")


POINT = {
    "workload": "mlp",
    "items": "samples",
    "num_items": 64,
    "tolerance": 0.1,
    "samples": {"single": [2.0, 3.0, 4.0], "ddp": [6.0], "train-step": [4.0], "train-step-compiled": [5.0]},
    "differences": {"single": 0.0, "ddp": 1e-6, "train-step": 1e-6, "train-step-compiled": 0.09},
    "peak_mb": {"single": None, "ddp": 1.5, "train-step": None, "train-step-compiled": None},
    "bucket_mib": {"single": None, "ddp": 100, "train-step": None, "train-step-compiled": None},
    "eager_because": {"train-step-compiled": "it reads the device"},
}


def test_rows_say_what_is_captured_and_how_far_from_the_floor():
    single, ddp, captured, fallen = rows_of(POINT, resolve(**WORDS, num_gpus=0))
    assert (single["ms"], single["efficiency"], single["captured"]) == (3.0, 1.0, False)
    assert single["spread"] == pytest.approx(2 / 3)
    assert (ddp["efficiency"], ddp["peak_mb"], ddp["bucket_mib"]) == (0.5, 1.5, 100)
    assert (captured["captured"], captured["efficiency"]) == (True, 0.75)
    assert (fallen["captured"], fallen["eager_because"]) == (False, "it reads the device")
    row = with_origin([single], ["hora", "bench", "step"])[0]
    assert (row["what"], row["value"], row["command"]) == ("step.mlp/single", 3.0, "hora bench step")


def test_rows_count_the_samples_of_all_ranks_that_work_together():
    single, ddp, *_ = rows_of(POINT, resolve(**WORDS, num_gpus=0))
    assert (single["items"], single["ranks"], single["items_per_s"]) == ("samples", 2, pytest.approx(64 / 0.003))
    assert ddp["items_per_s"] == pytest.approx(2 * 64 / 0.006)


@pytest.mark.parametrize("difference", [0.11, math.nan])
def test_a_variant_that_does_not_do_the_work_is_an_error(difference):
    rows = rows_of(POINT, resolve(**WORDS, num_gpus=0))
    require_right(rows)
    rows = rows_of(POINT | {"differences": POINT["differences"] | {"ddp": difference}}, resolve(**WORDS, num_gpus=0))
    with pytest.raises(HoraError, match=rf"nothing is written: ddp of mlp \({difference}, allowed are 0\.1\)$"):
        require_right(rows)


def test_the_picture_is_a_png(tmp_path):
    rows = rows_of(POINT, resolve(**WORDS, num_gpus=0))
    draw([*rows, *rows_of(POINT | {"workload": "other", "samples": {"ddp": [1.0]}}, resolve(**WORDS, num_gpus=0))], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
