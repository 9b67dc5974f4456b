"""What is recorded of a script, in a process of its own each: recording changes torch for good."""

import atexit
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from prove_kit import Nest

from hora.diag.prove.records import Run, read_run

pytestmark = pytest.mark.timeout(60)


def recorded(nest: Nest, tmp_path: Path, body: Callable[..., None], *, steps: int = 20, without: str = "") -> Run:
    records = tmp_path / "records"
    records.mkdir()
    nest.run(body, tmp_path / "output.txt", HORA_PROVE=str(records), HORA_PROVE_STEPS=str(steps), HORA_PROVE_WITHOUT=without)
    return read_run(records, 1)


def body_plain():
    import torch
    import torch.nn.functional as F

    from hora.diag.prove import recorder

    recorder.start()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}])
    with pytest.raises(SystemExit):
        for _ in range(9):
            inputs = torch.randn(2, 3)
            loss = F.cross_entropy(model(inputs), torch.tensor([0, -100]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.eval()
            model(inputs[:1])
            model.train()


def test_steps_of_a_plain_script(prove_nest: Nest, tmp_path: Path) -> None:
    run = recorded(prove_nest, tmp_path, body_plain, steps=2)
    assert (run.steps, run.begun) == (2, {0: 3})
    first, second = run.at(1)[0], run.at(2)[0]
    assert set(first.facts("gradient")) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert set(first.facts("buffer")) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert {"exp_avg of 0.weight", "step of 3.bias"} <= set(first.facts("state"))
    assert [group["lr"] for group in first.groups] == [0.5, 0.001]
    assert [micro.denominator for micro in first.micro_steps] == [1]
    assert [len(call) for call in first.forwards] == [1]
    assert (first.notes["random_moved"], first.notes["batch_norms"]) == (True, ["1"])
    before = run.at(0)[0].facts("buffer")["1.num_batches_tracked"]
    assert (before.sketch.tolist(), first.facts("buffer")["1.num_batches_tracked"].sketch.tolist()) == ([0.0], [1.0])
    assert [len(call[0].keys[0]) for call in second.evaluation] == [1]
    assert first.facts("parameter")["0.weight"].digest != second.facts("parameter")["0.weight"].digest


def test_evaluation_after_the_last_step_is_seen(prove_nest: Nest, tmp_path: Path) -> None:
    run = recorded(prove_nest, tmp_path, body_plain, steps=2)
    assert [[len(calls) for calls in run.evaluations(number)] for number in (0, 1, 2)] == [[0], [1], [1]]


def body_shells():
    """An optimizer in an optimizer, as Hora's and Horovod's are, and a step() that sums gradients itself before the one it overrides."""
    import torch

    from hora.diag.prove import recorder

    class Averaging(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.fill_(7.0)
            return super().step(closure)

    recorder.start()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Averaging([weight], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    atexit._run_exitfuncs()


def test_gradients_are_those_that_the_innermost_optimizer_used(prove_nest: Nest, tmp_path: Path) -> None:
    run = recorded(prove_nest, tmp_path, body_shells)
    assert run.steps == 2
    (facts,) = run.at(1)[0].facts("gradient").values()
    assert facts.sketch.tolist() == [7.0, 7.0]
    assert list(run.at(1)[0].facts("parameter")) == ["group 0 parameter 0"]
    assert run.ends[0].notes["failed"] is False


def body_inputs():
    import torch
    from torch.utils.checkpoint import checkpoint

    from hora.diag.prove import recorder

    @dataclasses.dataclass
    class Batch:
        words: torch.Tensor
        weights: list

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, batch, *, scale=None):
            return checkpoint(self.inner, batch["batch"].weights[0], use_reentrant=False) * scale

    recorder.start()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = {"batch": Batch(torch.tensor([[1, 2], [3, 4], [1, 2]]), [torch.ones(3, 2)])}
    loss = model(batch, scale=torch.tensor(2.0)).sum() + torch.nn.MSELoss()(torch.ones(2, requires_grad=True), torch.zeros(2))
    loss.backward()
    optimizer.step()


def test_inputs_are_found_wherever_they_are_and_recomputation_is_no_call(prove_nest: Nest, tmp_path: Path) -> None:
    (record,) = recorded(prove_nest, tmp_path, body_inputs).at(1)
    (call,) = record.forwards
    assert [(rows.slot, rows.shape, rows.whole) for rows in call] == [("0.batch.words", (3, 2), True), ("0.batch.weights.0", (3, 2), False)]
    keys = call[0].keys[0].tolist()
    assert keys[0] == keys[2] != keys[1]
    assert len(call[0].keys) == 2


@pytest.mark.parametrize("without", ["float64", "dropout", "batch_norm", "float64,dropout,batch_norm"])
def test_ablations_take_out_what_they_name(prove_nest: Nest, tmp_path: Path, without: str) -> None:
    run = recorded(prove_nest, tmp_path, body_plain, steps=1, without=without)
    (record,) = run.at(1)
    assert {facts.dtype for facts in record.facts("gradient").values()} == {"float64" if "float64" in without else "float32"}
    assert record.notes["random_moved"] == ("dropout" not in without)
    mean = record.facts("buffer")["1.running_mean"]
    assert (mean.digest == run.at(0)[0].facts("buffer")["1.running_mean"].digest) == ("batch_norm" in without)


def body_samplers():
    import torch
    from torch.utils.data.distributed import DistributedSampler

    from hora.diag.prove.samplers import Samplers

    seen = Samplers()
    seen.install()
    data = torch.utils.data.TensorDataset(torch.arange(4))
    shuffling, still = (DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle) for shuffle in (True, False))
    for epoch in range(2):
        shuffling.set_epoch(epoch)
        assert len([*shuffling, *still]) == 4
        seen.settle(trains=True)
        assert len([*shuffling, *still]) == 4
        seen.settle(trains=False)
        assert seen.repeated is None
    list(shuffling)
    seen.settle(trains=True)
    assert seen.repeated == 1


def test_epoch_that_comes_twice_is_seen(prove_nest: Nest, tmp_path: Path) -> None:
    prove_nest.run(body_samplers, tmp_path / "output.txt")
