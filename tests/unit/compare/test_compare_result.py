"""What `hora compare` concludes from training runs, and what it refuses or leaves out before any."""

import math

import pytest

from hora.cli.main import main
from hora.compare.course import compare
from hora.compare.kinds import KINDS
from hora.compare.request import REFERENCE, TWIN, VARIANTS, Here, Request, choose_ranks, chosen, why_not
from hora.compare.result import conclude
from hora.compare.show import cells, notes, rows_of
from hora.errors import ConfigError

LOSSES = [2.0, 1.0, 0.5]


def request(**changed) -> Request:
    asked = {
        "variants": (REFERENCE, "ddp", "overlap"),
        "ranks": 2,
        "steps": 6,
        "repeats": 2,
        "on_gpus": False,
        "threads": 1,
        "dropout": False,
    }
    return Request("image", None, None, (), **(asked | changed))


def point(variant: str = REFERENCE, *, losses=None, loss: float = 0.4, seconds: float = 1.0, waiting=None) -> dict:
    count = len(request().stretches())
    losses = losses or [1.0] * count
    return {
        "variant": variant, "seconds": [9.0, *[seconds] * (count - 1)], "losses": losses, "loss": loss, "quality": 0.9, "waiting": waiting,
        "backend": "shm", "device": "cpu", "eager_because": None,
    }  # fmt: skip


def outcomes(ddp: list[dict], twin: dict | None = None):
    points = {REFERENCE: [point(), point(seconds=2.0)], "ddp": ddp, "overlap": [point(waiting=0.25, seconds=0.75)] * 2}
    return {one.variant: one for one in conclude(points, twin or point(), request())}


def test_all_steps_are_in_one_stretch_and_those_that_warm_up_are_not_timed():
    for steps in (4, 6, 47, 100, 1001):
        asked = request(steps=steps)
        assert sum(asked.stretches()) == steps
        assert asked.stretches()[0] == asked.warm_up <= 12
        assert max(asked.stretches()[1:]) - min(asked.stretches()[1:]) <= 1


def test_times_are_compared_with_one_process():
    found = outcomes([point("ddp", seconds=3.0)] * 2)
    assert found[REFERENCE].times_s == (5.0, 10.0)
    assert (found["overlap"].speed_up, found["overlap"].efficiency, found["overlap"].waiting) == (2.0, 1.0, 0.25)
    assert (found["ddp"].speed_up, found["ddp"].efficiency, found["ddp"].waiting) == (0.5, 0.25, None)


def test_what_rounding_explains_agrees_and_what_it_does_not_is_found_with_its_step():
    late = [1.0] * 5 + [1.0005]
    assert outcomes([point("ddp", losses=late)] * 2)["ddp"].departs_at == request().steps
    assert outcomes([point("ddp", losses=late)] * 2, twin=point(losses=[1.0] * 5 + [1.0001]))["ddp"].agrees
    # What the twin does late explains nothing that is early.
    early = outcomes([point("ddp"), point("ddp", losses=[1.0, 1.0005, *[1.0] * 4])], twin=point(losses=[1.0] * 5 + [1.0001]))["ddp"]
    assert early.departs_at == sum(request().stretches()[:2])
    assert early.difference == pytest.approx(5e-4)
    # ... and what it explains late is not said of what departed early.
    both = outcomes([point("ddp", losses=[1.0, 1.0005, *[1.0] * 3, 1.001])] * 2, twin=point(losses=[1.0] * 5 + [1.0001]))["ddp"]
    assert (both.difference, both.allowed) == pytest.approx((5e-4, 1e-5))
    assert not outcomes([point("ddp", loss=0.5)] * 2)["ddp"].agrees
    assert not outcomes([point("ddp", losses=[math.nan] * 6)] * 2)["ddp"].agrees


def test_one_run_whose_losses_are_no_numbers_is_enough_to_differ():
    broken = point("ddp", losses=[1.0] * 5 + [math.nan])
    for runs in ([point("ddp"), broken], [broken, point("ddp")]):
        assert outcomes(runs)["ddp"].departs_at == request().steps
    points = {REFERENCE: [point(), point(losses=[1.0] * 5 + [math.nan])], "ddp": [point("ddp")] * 2, "overlap": [broken] * 2}
    found = conclude(points, point(), request())
    assert [one.departs_at for one in found] == [request().steps, None, request().steps]
    assert found[1].blurs_at == request().steps


def test_what_runs_of_one_process_do_to_each_other_is_rounding_too_and_is_said_where_it_is_much():
    late = [1.0] * 5 + [1.5]
    points = {REFERENCE: [point(), point(losses=late)], "ddp": [point("ddp", losses=[1.0] * 5 + [3.0])] * 2, "overlap": [point()] * 2}
    found = conclude(points, point(), request())
    assert [one.agrees for one in found] == [True, True, True]
    assert found[0].blurs_at == request().steps
    said = "By step 6 rounding alone moves the losses of one process by more than a tenth"
    assert said in " ".join(notes(found, {}, KINDS["image"], request(), dropout="none"))
    agreeing = list(outcomes([point("ddp")] * 2).values())
    assert said not in " ".join(notes(agreeing, {}, KINDS["image"], request(), dropout="none"))


def test_losses_count_only_as_long_as_rounding_moves_them_little():
    # Of a model that has learnt all there is: losses of nearly zero, of which each run has others.
    twin = point(losses=[1.0, 1.00001, *[1.5] * 4])
    far = [1.0, 1.00002, *[600.0] * 4]
    ddp = outcomes([point("ddp", losses=far)] * 2, twin=twin)["ddp"]
    assert (ddp.agrees, ddp.blurs_at) == (True, sum(request().stretches()[:3]))
    assert ddp.difference == pytest.approx(2e-5)
    assert cells([ddp], KINDS["image"], request())[1][0][-1] == f"yes, within 2e-05, before step {ddp.blurs_at}"
    # What departed before that counts, and so does what is no number.
    assert not outcomes([point("ddp", losses=[1.0, 1.1, *[1.0] * 4])] * 2, twin=twin)["ddp"].agrees
    assert not outcomes([point("ddp", losses=[*far[:5], math.nan])] * 2, twin=twin)["ddp"].agrees
    assert outcomes([point("ddp", losses=far)] * 2, twin=point(losses=[2.0] * 6))["ddp"].agrees


def test_rows_and_notes_say_what_differs_and_what_was_left_out():
    found = list(outcomes([point("ddp", loss=0.5)] * 2).values())
    rows = rows_of(found, KINDS["image"], request(), "digits", ["hora", "compare", "image"])
    assert [(row["what"], row["ranks"], row["agrees"]) for row in rows] == [
        ("compare.image.digits/single", 1, True), ("compare.image.digits/ddp", 2, False), ("compare.image.digits/overlap", 2, True),
    ]  # fmt: skip
    assert rows[0].keys() >= {"what", "value", "unit", "ranks", "machine", "versions", "command", "commit", "samples", "losses"}
    told = "\n".join(notes(found, {"horovod": "Horovod is not installed"}, KINDS["image"], request(), dropout="off"))
    assert "horovod was left out: Horovod is not installed." in told
    assert "ddp does not train the same model: it averages the mean losses of the ranks" in told
    assert "overlap does not train the same model" not in told
    assert "Dropout is off" in told


def test_what_is_normalised_apart_is_not_put_down_to_the_means_of_ranks():
    points = {REFERENCE: [point()] * 2, "ddp": [point("ddp", loss=0.5)] * 2, "overlap": [point("overlap", loss=0.5)] * 2}
    found = conclude(points, point(), request())
    told = "\n".join(notes(found, {}, KINDS["image"], request(), dropout="none", apart=True))
    assert "overlap does not train the same model: model.batch_norm=local normalises over the images of each rank alone" in told
    assert "ddp does not train the same model: model.batch_norm=local normalises over the images of each rank alone" in told
    model = ["model.batch_norm=local", "data.path=synthetic"]
    image = KINDS["image"]
    assert [image.normalises_apart(image.resolve(None, None, [f"model.arch={arch}", *model])) for arch in ("resnet20", "vgg19", "vgg19_bn")] == [
        True, False, True,
    ]  # fmt: skip
    assert not image.normalises_apart(image.resolve(None, None, ["model.arch=resnet20"]))


def test_variants_take_turns_and_the_twin_runs_once():
    started = []

    def starter(_module, text, ranks, on_point):
        asked = Request.parse(text)
        started.append((ranks, asked.variants))
        for variant in asked.variants:
            on_point(point(variant))

    compare(request(), lambda _: None, starter)
    assert started == [(1, (REFERENCE, TWIN)), (2, ("ddp", "overlap")), (1, (REFERENCE,)), (2, ("overlap", "ddp"))]


def test_what_cannot_be_trained_here_has_a_reason():
    cpus = Here(num_gpus=0, horovod=None, carries_state=False)
    assert {variant for variant in VARIANTS if why_not(variant, cpus)} == {"data_parallel", "captured", "horovod"}
    gpus = Here(num_gpus=4, horovod="0.28.1", carries_state=False)
    assert not any(why_not(variant, gpus) for variant in VARIANTS)
    assert "first dimension" in str(why_not("data_parallel", Here(4, None, carries_state=True)))
    assert chosen("ddp") == (REFERENCE, "ddp")
    assert [choose_ranks(None, 0), choose_ranks(None, 4), choose_ranks(3, 0)] == [2, 4, 3]
    for nproc, num_gpus, said in ((1, 0, "but --nproc is 1"), (None, 1, "one GPU is here"), (5, 4, "5 ranks are asked for and 4 GPUs")):
        with pytest.raises(ConfigError, match=said):
            choose_ranks(nproc, num_gpus)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["image", "--variants", "fast"], 'unknown variant "fast"'),
        (["image", "--nproc", "65"], "65 ranks are more than data.global_batch_size = 64"),
        (["lm", "--nproc", "21"], "21 ranks are more than data.rows = 20"),
        (["image", "--set", "exact=true"], "exact mode is Hora's alone"),
        (["nmt", "--set", "training_configs.precision=float16"], "training_configs.precision must be float32 or bfloat16"),
        (["image", "--html", "/nowhere/page.html"], "cannot write /nowhere/page.html"),
        (["image", "--set", "model.arsch=lenet"], "model.arsch"),
        (["lm", "--data", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(words, said, monkeypatch, capsys):
    monkeypatch.setattr("hora.compare.course.start_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["compare", *words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
