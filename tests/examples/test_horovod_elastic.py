"""An elastic script for Horovod, unchanged, whose ranks meet anew once and lose one for good once: it ends with the model of a run without that."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

LENGTH, BATCH, EPOCHS = 37, 3, 2

SCRIPT = f"""\
import json
import os
import signal

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import get_handler_registry

hvd.init()
assert TorchState is hvd.elastic.TorchState and issubclass(TorchState, State) and ElasticSampler is hvd.elastic.ElasticSampler
assert len(get_handler_registry()) >= 4
torch.manual_seed(5)
dataset = torch.utils.data.TensorDataset(torch.arange({LENGTH}), torch.randn({LENGTH}, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
generation = os.environ["HORA_GENERATION"]
train_sampler = hvd.elastic.ElasticSampler(dataset, seed=1)
train_loader = torch.utils.data.DataLoader(dataset, {BATCH}, sampler=train_sampler)
lives = 0


@hvd.elastic.run
def train(state):
    global lives
    lives += 1
    while state.epoch < {EPOCHS}:
        for batch_idx, (numbers, inputs) in enumerate(train_loader):
            if (generation, lives, state.epoch, state.batch) == ("0", 1, 0, 3):
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="ranks do not agree once")
            if (generation, state.epoch, state.batch, hvd.rank()) == ("0", 1, 5, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
            state.batch += 1
            train_sampler.record_batch(batch_idx, {BATCH})
            with open(f"seen.{{hvd.rank()}}", "a") as file:
                print(json.dumps([generation, lives, state.epoch, state.batch, numbers.tolist()]), file=file)
            if state.batch % 2 == 0:
                state.commit()
        state.epoch += 1
        state.batch = 0
        train_sampler.set_epoch(state.epoch)
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, train_sampler=train_sampler, epoch=0, batch=0)
state.register_reset_callbacks([lambda: print("callback", generation)])
train(state)
if hvd.rank() == 0:
    print("model", json.dumps([parameter.tolist() for parameter in model.parameters()]))
"""


def trained_alone() -> tuple[list[torch.Tensor], list[list[int]]]:
    """The parameters of one process, and the samples that each rank sees in each epoch, in Horovod's order."""
    torch.manual_seed(5)
    inputs, model = torch.randn(LENGTH, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dealt = []
    for epoch in range(EPOCHS):
        order = list(range(LENGTH))
        random.Random(1 + epoch).shuffle(order)
        order += order[: LENGTH % 2]
        ranks = [order[rank::2] for rank in range(2)]
        dealt += ranks
        for begin in range(0, len(ranks[0]), BATCH):
            optimizer.zero_grad()
            for own in ranks:
                (model(inputs[own[begin : begin + BATCH]]).square().mean() / 2).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], dealt


def test_a_script_goes_on_from_its_commits_when_ranks_disagree_and_when_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    variables = {"HORA_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    words = [sys.executable, "-m", "hora", "run", "--horovod", "--max-restarts", "1", "-np", "2", "script.py"]
    result = subprocess.run(words, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list((tmp_path / "tmp").glob("hora-*"))
    assert re.findall(r"\[0\] callback (\d)", result.stdout) == ["0", "1"]
    parameters, dealt = trained_alone()
    found = json.loads(result.stdout.split("[0] model ")[1].splitlines()[0])
    assert all(torch.allclose(torch.tensor(one), other, rtol=1e-5) for one, other in zip(found, parameters, strict=True))
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"seen.{rank}").read_text().splitlines()]
        # What was processed after a commit and lost: a later life has done it again.
        last = {(epoch, batch): numbers for *_, epoch, batch, numbers in lines}
        for epoch in range(EPOCHS):
            assert [n for key in sorted(last) if key[0] == epoch for n in last[key]] == dealt[2 * epoch + rank]
        again = [(epoch, batch) for *_, epoch, batch, _ in lines if [line[2:4] for line in lines].count([epoch, batch]) > 1]
        assert again == [(0, 3), (0, 3), (1, 5), (1, 5)]


LOSING = """\
import os
import sys
import time

import horovod.torch as hvd
import torch

hvd.init()
state = hvd.elastic.ObjectState(lambda obj: hvd.broadcast_object(obj), hvd.rank, step=0)


@hvd.elastic.run
def train(state):
    while state.step < 100_000:
        first = (os.environ["HORA_GENERATION"], state.step) == ("0", 2)
        if first and hvd.rank() == 1:
            while not os.path.exists("waits"):
                time.sleep(0.01)
            sys.exit(0)
        handle = hvd.allreduce_async(torch.ones(1), name="loss")
        if first:
            open("waits", "x").close()
        hvd.synchronize(handle)
        state.step += 1
        state.commit()
        if (os.environ["HORA_GENERATION"], state.step, hvd.rank()) == ("1", 4, 0):
            print("goes on", flush=True)


train(state)
"""


def test_a_rank_that_ends_is_missed_at_once_and_a_commit_that_is_lost_is_not_promised(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOSING)
    (tmp_path / "tmp").mkdir()
    variables = {
        "HORA_STATE_DIR": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path / "tmp"),
        "HORA_TIMEOUT_S": "600",
    }
    words = [sys.executable, "-m", "hora", "run", "--horovod", "--max-restarts", "1", "-np", "2", "script.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        try:
            assert job.stdout.readline() == "[0] goes on\n"
            job.send_signal(signal.SIGTERM)
            said = job.communicate(timeout=60)[1]
        finally:
            job.kill()
    assert "Rank 1 has come to the end of its script." in said
    assert "Rank 0 waited for tensor 'allreduce.loss'." in said
    assert "cannot meet anew: Horovod initialization failed: rank 0 waits for rank 1 of 2 in vain: it has ended, with exit code 0" in said
    assert job.returncode == 143, said
    assert "the exit code is 143, and not 75. Let HORA_HVD_COMMIT_DIR name a directory" in said
    assert "start again" not in said
    assert not list((tmp_path / "tmp").glob("hora-*"))
