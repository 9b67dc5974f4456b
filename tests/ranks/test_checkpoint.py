"""Checkpoints saved and loaded by several ranks together."""

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hora
from hora.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch, ConfigError, ReplicaMismatch
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.checkpoint.content import share_tensor
from hora.train.generators import capture_generators, restore_generators
from hora.train.weights import load_weights

DTYPES = (torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


def _state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {f"weight.{dtype}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(seed)), "exp_avg": torch.randn(7, generator=generator)}, 1: {}},
            "param_groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.999), "params": [0, 1], "foreach": None}],
        },
        "counters": {"best": math.inf, "tokens": 2**60 + seed, "note": "é", "raw": bytes([seed, 0, 255])},
    }


def _same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left.cpu(), right.cpu())
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and left == right


@dataclasses.dataclass(frozen=True)
class _Progress:
    seen: set[int]
    losses: np.ndarray


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@run_ranks(1, 3)
def test_everything_that_can_be_sent_can_be_kept(tmp_path: Path) -> None:
    progress = _Progress({1, 2}, np.arange(5, dtype=">f4"))
    tree = {"progress": progress, "long": (b"x" * 70_001, "é" * 70_001), ("pair", None): [1j, np.int8(3), frozenset({True})]}
    Checkpointer(tmp_path).save({"own": tree}, step=1, epoch=0, rank_state=tree)
    restored = Checkpointer(tmp_path).load()
    for found in (restored.state["own"], restored.rank_state):
        kept = found.pop("progress")
        assert kept.seen == progress.seen
        assert kept.losses.dtype == progress.losses.dtype
        assert kept.losses.tolist() == progress.losses.tolist()
        assert repr(found) == repr({key: value for key, value in tree.items() if key != "progress"})


@run_ranks(1, 2, 3, 4)
def test_every_rank_gets_what_rank_zero_saved_and_its_own(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    own = {"rank": hora.rank(), "noise": torch.full((hora.rank(),), hora.rank())}
    path = checkpointer.save(_state(10) if hora.rank() == 0 else {}, step=1200, epoch=3, metric=0.5, rank_state=own)
    restored = Checkpointer(tmp_path).load()
    assert _same(restored.state, _state(10))
    assert _same(restored.rank_state, own)
    assert restored.path == path == tmp_path / "step-00001200.g0"
    facts = restored.manifest
    assert (facts.step, facts.epoch, facts.metric, facts.world_size, facts.logical_ranks) == (
        1200,
        3,
        0.5,
        hora.world_size(),
        hora.world_size(),
    )
    assert (facts.hora, facts.torch) == (hora.__version__, torch.__version__)


@run_ranks(2)
def test_a_checkpoint_can_be_read_with_other_tools(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save({"model": {"a.weight": torch.arange(3.0)}}, step=0, epoch=0)
    assert torch.equal(load_file(path / "model.safetensors")["a.weight"], torch.arange(3.0))


@run_ranks(2)
def test_what_is_saved_does_not_change_with_the_tensors(tmp_path: Path) -> None:
    weight = torch.ones(1000)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"model": {"w": weight}}, step=1, epoch=0)
    weight.zero_()
    restored = checkpointer.load()
    assert torch.equal(restored.state["model"]["w"], torch.ones(1000))
    restored.state["model"]["w"].zero_()
    assert torch.equal(checkpointer.load().state["model"]["w"], torch.ones(1000))


@run_ranks(1, 2)
def test_ranks_without_a_state_of_their_own_restore_none(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"model": {}}, step=1, epoch=0)
    assert checkpointer.load().rank_state is None
    assert _names(tmp_path / "step-00000001.g0") == ["manifest.json", "model.json", "model.safetensors"]


def _save_two(directory: Path) -> None:
    Checkpointer(directory).save(_state(7), step=5, epoch=1, rank_state={"rank": hora.rank()})


def _load_with_other_ranks(directory: Path) -> None:
    restored = Checkpointer(directory).load()
    assert _same(restored.state, _state(7))
    assert restored.rank_state is None
    assert restored.manifest.logical_ranks == 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_gets_the_shared_state_only(spawn_ranks, tmp_path, world_size):
    for size, body in ((2, _save_two), (world_size, _load_with_other_ranks)):
        outcomes = spawn_ranks(size, body, directory=tmp_path).wait()
        assert not any(outcome.bad for outcome in outcomes), outcomes


@run_ranks(2)
def test_the_newest_and_the_best_are_kept_and_found(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate([3.0, 1.0, math.nan, 2.0, None]):
        checkpointer.save({"model": {"step": step}}, step=step, epoch=0, metric=metric)
    assert _names(tmp_path) == ["step-00000001.g0", "step-00000003.g0", "step-00000004.g0"]
    assert checkpointer.load("latest").state["model"]["step"] == 4
    assert checkpointer.load("best").state["model"]["step"] == 1
    assert Checkpointer(tmp_path, best="max").load("best").state["model"]["step"] == 3
    assert checkpointer.load(tmp_path / "step-00000003.g0").state["model"]["step"] == 3


@run_ranks(2)
def test_a_later_start_is_newer_whatever_its_step(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save({"model": {"start": 0}}, step=50, epoch=0)
    second = Checkpointer(tmp_path)
    assert second.load().state["model"]["start"] == 0
    assert second.save({"model": {"start": 1}}, step=20, epoch=0).name == "step-00000020.g1"
    assert Checkpointer(tmp_path).load().state["model"]["start"] == 1


@run_ranks(2)
def test_a_step_saved_again_stands_beside_the_first(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_best=0)
    for metric in (None, 1.0):
        checkpointer.save({"model": {"metric": metric}}, step=7, epoch=0, metric=metric)
    assert _names(tmp_path) == ["step-00000007.g0", "step-00000007.g1"]
    assert checkpointer.load().state["model"]["metric"] == 1.0


@run_ranks(2)
def test_a_start_that_was_replaced_can_save_no_more(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path)
    first.save({"model": {}}, step=1, epoch=0)
    Checkpointer(tmp_path).save({"model": {}}, step=2, epoch=0)
    with pytest.raises(CheckpointError, match=r"generation 0 of this run must be the last, but generation 1 has saved step-00000002\.g1"):
        first.save({"model": {}}, step=3, epoch=0)


@run_ranks(1, 2)
def test_an_absent_checkpoint_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(
            CheckpointError,
            match=r"nothing to resume from in .*: start without --resume, or give the right run directory; a script asks is_empty\(\)",
        ):
            Checkpointer(directory).load()
    with pytest.raises(CheckpointIncomplete, match=r"manifest\.json: No such file"):
        Checkpointer(tmp_path).load(tmp_path / "step-00000001.g0")
    Checkpointer(tmp_path).save({"model": {}}, step=1, epoch=0)
    with pytest.raises(CheckpointError, match="has a metric"):
        Checkpointer(tmp_path).load("best")
    with pytest.raises(ConfigError, match="which must be 'latest', 'best' or a Path, but is 'newest' instead"):
        Checkpointer(tmp_path).load("newest")


@run_ranks(1, 2, 3)
def test_what_cannot_be_kept_is_refused_on_every_rank_by_its_place(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ConfigError, match=r"entry 'model' of the checkpoint: layers\.0 must be .* but is builtins\.object instead"):
        checkpointer.save({"model": {"layers": [object()]}}, step=1, epoch=0)
    with pytest.raises(ConfigError, match="each entry of a checkpoint must be named"):
        checkpointer.save({"../model": {}}, step=1, epoch=0)
    with pytest.raises(ConfigError, match="step must be an integer from 0"):
        checkpointer.save({"model": {}}, step=-1, epoch=0)
    last = hora.world_size() - 1
    with pytest.raises(ConfigError, match=rf"rank {last} cannot send an object: rank_state\.own must be .* but is builtins\.range instead"):
        checkpointer.save({"model": {}}, step=1, epoch=0, rank_state={"own": range(2)} if hora.rank() == last else None)
    assert _names(tmp_path) == []
    checkpointer.save({"model": {}}, step=1, epoch=0)


@run_ranks(1, 2)
def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / f"file{hora.rank()}").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written in .*file0"):
        Checkpointer(tmp_path / "file0").prepare()
    with pytest.raises(CheckpointError, match=r"must have room for two checkpoints of 1125899906842624 bytes each, but has \d+ bytes free"):
        Checkpointer(tmp_path / "new").prepare(size_bytes=2**50)
    Checkpointer(tmp_path / "new").prepare(size_bytes=1000)
    assert _names(tmp_path / "new") == []


@run_ranks(2)
def test_prepare_fixes_the_generation(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save({"model": {}}, step=1, epoch=0)
    early = Checkpointer(tmp_path)
    early.prepare()
    Checkpointer(tmp_path).save({"model": {}}, step=2, epoch=0)
    assert early.save({"model": {}}, step=3, epoch=0).name == "step-00000003.g1"


@run_ranks(2)
def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(hora.rank())
    random.seed(hora.rank())
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({}, step=1, epoch=0, rank_state=capture_generators(hora.device()))
    expected = [random.random(), *torch.rand(3).tolist()]
    restore_generators(checkpointer.load().rank_state, hora.device())
    assert [random.random(), *torch.rand(3).tolist()] == expected
    firsts = hora.all_gather(torch.tensor([expected[0]], dtype=torch.float64))
    assert firsts[0] != firsts[1]


@run_ranks(1, 2, 3)
def test_large_tensors_travel_in_pieces() -> None:
    for size in (0, 1, 999):
        tensor = torch.arange(float(size)) if hora.rank() == 0 else torch.full((size,), -1.0)
        share_tensor(tensor, message_bytes=1000)
        assert torch.equal(tensor, torch.arange(float(size)))


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.out = torch.nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = _Tied()
    model.norm.running_mean += 1.5
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@run_ranks(1, 2)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "pt_in_a_dict"])
def test_foreign_weights_are_loaded_on_every_rank(tmp_path: Path, prefix: str, kind: str) -> None:
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if hora.rank() == 0:
        weights = {prefix + name: tensor for name, tensor in _weights().items()}
        if kind == "safetensors":
            del weights[prefix + "out.weight"]
            save_file(weights, path)
        else:
            torch.save({"epoch": 3, "state_dict": weights} if kind == "pt_in_a_dict" else weights, path)
    torch.manual_seed(100 + hora.rank())
    model = _Tied()
    load_weights(path, model, allow_torch_file=True)
    assert _same(dict(model.state_dict()), _weights())
    assert model.out.weight is model.embedding.weight


@run_ranks(1, 2)
def test_the_weights_of_another_runs_checkpoint_are_loaded(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save({"model": _weights(), "counters": {"step": 1}}, step=1, epoch=0)
    for place in (path, tmp_path):  # a checkpoint; a directory of them, or a run directory: the newest
        model = _Tied()
        load_weights(place, model)
        assert _same(dict(model.state_dict()), _weights())
    other = checkpointer.save({"optimizer": {}}, step=2, epoch=0)
    with pytest.raises(ConfigError, match="must hold a state dict, but holds NoneType instead"):
        load_weights(other, model)
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="empty must be a checkpoint .* or a run directory, but holds no checkpoint"):
        load_weights(tmp_path / "empty", model)


@run_ranks(1, 2)
def test_foreign_weights_that_do_not_fit_are_named_and_change_nothing(tmp_path: Path) -> None:
    model = _Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if hora.rank() == 0:
        weights = _weights()
        del weights["norm.weight"], weights["out.weight"]
        weights["norm.bias"] = torch.zeros(4)
        weights["module.head"] = torch.zeros(1)
        save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointMismatch) as caught:
        load_weights(tmp_path / "weights.safetensors", model)
    assert str(caught.value).endswith(
        "do not fit the model: missing: norm.weight; unexpected: module.head; of another shape: norm.bias must be [3], but is [4] instead"
    )
    assert _same(dict(model.state_dict()), before)
    load_weights(tmp_path / "weights.safetensors", model, partial=True)
    after = model.state_dict()
    left = {"norm.weight", "norm.bias"}
    assert _same({name: after[name] for name in left}, {name: before[name] for name in left})
    taken = {name: tensor for name, tensor in _weights().items() if name in after and name not in left}
    assert _same({name: after[name] for name in taken}, taken)
    with pytest.raises(CheckpointMismatch, match="do not fit"):
        load_weights(tmp_path / "weights.safetensors", torch.nn.Linear(9, 9), partial=True)


@run_ranks(1, 2)
def test_a_pickle_is_read_only_when_asked_for_and_never_executed(tmp_path: Path) -> None:
    path, proof = tmp_path / "weights.pt", tmp_path / "executed"
    if hora.rank() == 0:
        torch.save({"weight": _Bomb(proof)}, path)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=r"weights must be a \.safetensors file, but .*weights\.pt is not; .*allow_torch_file=True \(--allow-torch-file\)"
    ):
        load_weights(path, model)
    with pytest.raises(ConfigError, match="is no file of torch.save that holds weights only"):
        load_weights(path, model, allow_torch_file=True)
    assert not proof.exists()


class _Bomb:
    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple:
        return Path.touch, (self._proof,)


@run_ranks(2)
def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    if hora.rank() == 0:
        (tmp_path / "a.safetensors").write_bytes(b"nothing")
        torch.save([1, 2], tmp_path / "list.pt")
        torch.save({"lr": 0.1}, tmp_path / "numbers.pt")
    model = torch.nn.Linear(2, 2)
    for name, words in (
        ("absent.safetensors", "cannot be read"),
        ("a.safetensors", "cannot be read"),
        ("list.pt", "must hold a state dict, but holds list instead"),
        ("numbers.pt", "must hold named tensors, but lr are none"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_weights(tmp_path / name, model, allow_torch_file=True)


@run_ranks(2, 3)
def test_state_that_is_not_the_same_on_all_ranks_is_not_written(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    odd = hora.rank() == hora.world_size() - 1
    model = {"weight": torch.ones(3), "running_mean": torch.full((2,), 1.5 if odd else 1.0), "steps": 7}
    message = r"after step 4 rank \d differs from ranks? .*, first in 'model.running_mean' \(1 of 2 tensors\).*hora\.sync_buffers\(module\)"
    with pytest.raises(ReplicaMismatch, match=message):
        checkpointer.save({"model": model}, step=4, epoch=0)
    assert not list(tmp_path.glob("step-*"))
    model["running_mean"].fill_(1.0)
    checkpointer.save({"model": model}, step=4, epoch=0)


@run_ranks(2)
def test_ranks_need_not_hand_in_what_is_written(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"model": {"weight": torch.ones(3)}} if hora.rank() == 0 else {}, step=1, epoch=0)
    assert checkpointer.load().state["model"]["weight"].tolist() == [1.0] * 3
