"""The workload of `peers`: DistributedDataParallel under torchrun, with a checkpoint that is written beside and renamed, and resumed from."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from hora.diag.chaos.injuries import flip
from hora.diag.chaos.journal import Journal
from hora.diag.chaos.settings import BATCH, SAMPLES, Settings


def main() -> None:
    """Runs as one rank."""
    settings = Settings.from_json(sys.argv[1])
    directory, rank = Path(settings.directory), int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    journal = Journal(directory, f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{attempt}", rank)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    data, targets = torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,))
    done = _resume(model, directory / "model.safetensors")
    journal.note("resumed", done=done)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    while done < settings.steps:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(done // (SAMPLES // BATCH)))
        chosen = order.view(-1, 2, BATCH // 2)[done % (SAMPLES // BATCH), rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(data[chosen]), targets[chosen]).backward()
        optimizer.step()
        done += 1
        journal.note("step", done=done)
        if settings.flip is not None and settings.flip[:2] == (rank, done):
            flip(next(model.parameters()), settings.flip[2])
            journal.note("flipped", done=done)
        if settings.kill == (rank, done) and attempt == 0:
            journal.note("killing", done=done)
            os.kill(os.getpid(), signal.SIGKILL)
        if done % settings.save_every == 0 and rank == 0:
            _save(model, done, directory / "model.safetensors")
        time.sleep(settings.step_s)
    sha = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    journal.note("end", digest=sha.hexdigest())
    dist.destroy_process_group()


def _resume(model: nn.Module, path: Path) -> int:
    if not path.exists():
        return 0
    tensors = load_file(path)
    done = int(tensors.pop("done"))
    model.load_state_dict(tensors)
    return done


def _save(model: nn.Module, done: int, path: Path) -> None:
    beside = path.with_suffix(".tmp")
    save_file({**model.state_dict(), "done": torch.tensor(done)}, beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


if __name__ == "__main__":
    main()
