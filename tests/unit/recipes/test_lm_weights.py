from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hora
from hora.errors import CheckpointMismatch, ConfigError
from hora.recipes.lm.config import ModelConfig
from hora.recipes.lm.model import LanguageModel, build_model
from hora.recipes.lm.weights import load_weights
from hora.testing import run_ranks
from hora.train.checkpoint.checkpointer import Checkpointer


def build(seed: int, hidden_size: int = 4) -> LanguageModel:
    return build_model(ModelConfig(hidden_size=hidden_size, num_layers=1), vocabulary_size=9, window=3, seed=seed).to(hora.device())


def assert_equal(model: LanguageModel, other: LanguageModel) -> None:
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def write(path: Path, model: LanguageModel, prefix: str = "") -> None:
    if hora.rank() == 0:
        save_file({prefix + name: tensor.cpu() for name, tensor in model.state_dict().items()}, path)
    hora.barrier()


@pytest.mark.parametrize("prefix", ["", "module."])
@run_ranks(1, 3)
def test_weights_of_a_plain_or_ddp_model_reach_every_rank(prefix: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", build(seed=1), prefix)
    model = build(seed=2 + hora.rank())
    path = tmp_path / "model.safetensors" if hora.rank() == 0 else tmp_path / "only rank 0 needs it"
    load_weights(model, path, Checkpointer(tmp_path / "checkpoints"))
    assert_equal(model, build(seed=1))


@run_ranks(2)
def test_weights_can_come_from_a_checkpoint(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path / "one").save({"model": build(seed=1).state_dict()}, step=0, epoch=0)
    model = build(seed=2)
    load_weights(model, path, Checkpointer(tmp_path / "two"))
    assert_equal(model, build(seed=1))


@run_ranks(2)
def test_weights_of_another_model_are_refused_on_all_ranks(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", build(seed=1, hidden_size=5))
    with pytest.raises(CheckpointMismatch, match=r"embedding\.weight must have shape \[9, 4\], but has \[9, 5\]"):
        load_weights(build(seed=1), tmp_path / "model.safetensors", Checkpointer(tmp_path / "checkpoints"))


@run_ranks(2)
def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    if hora.rank() == 0:
        save_file({"embedding.weights": torch.zeros(9, 4)}, tmp_path / "model.safetensors")
    hora.barrier()
    with pytest.raises(CheckpointMismatch, match=r"embedding\.weight is missing; embedding\.weights is unknown"):
        load_weights(build(seed=1), tmp_path / "model.safetensors", Checkpointer(tmp_path / "checkpoints"))


@pytest.mark.parametrize("content", [None, "PK\x03\x04 a pickle in a zip archive"])
@run_ranks(2)
def test_other_files_are_refused_with_the_way_to_convert_them(content: str | None, tmp_path: Path) -> None:
    if hora.rank() == 0 and content is not None:
        (tmp_path / "model.pt").write_text(content)
    hora.barrier()
    with pytest.raises(ConfigError, match=r"must be a safetensors file .* converted by safetensors\.torch\.save_file"):
        load_weights(build(seed=1), tmp_path / "model.pt", Checkpointer(tmp_path / "checkpoints"))
