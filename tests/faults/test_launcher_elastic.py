"""Jobs whose hosts come and go: with each change all ranks save, end, and start anew on the hosts that there are."""

import os
import signal
from pathlib import Path

from hosts_kit import Hosts, StartOn
from launcher_kit import PROMISED_S, Job, Start, kill

SAVING = """\
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda *_: os._exit(75))
tell('born', int(os.environ['HORA_GENERATION']), os.getpid(), int(os.environ['WORLD_SIZE']))
wait_forever()
"""


def born(job: Job, ranks: int, generation: int) -> list[int]:
    """The processes of a generation, once they are all there."""
    told = job.expect("born", ranks)
    assert {(numbers[0], numbers[2]) for numbers in told.values()} == {(generation, ranks)}
    return [numbers[1] for _, numbers in sorted(told.items())]


class Listing:
    """A command that prints what stands in a file, and options that have it asked often."""

    def __init__(self, directory: Path, *lines: str) -> None:
        self._file = directory / "listed"
        self.write(*lines)
        self.options = ("--host-discovery", f"cat {self._file}", "--discovery-interval", "0.2")

    def write(self, *lines: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        new.replace(self._file)


def test_hosts_that_are_listed_are_taken_in_and_others_left_out(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    listing = Listing(tmp_path, "alpha:2  # the first")
    job = start(SAVING, *listing.options, *hosts.rsh, "-x", "TELL", "--min-ranks", "1", "--max-ranks", "3", ranks=0)
    born(job, 2, 0)
    listing.write("alpha:2", "beta:2")
    born(job, 3, 1)
    listing.write("beta slots=2")
    born(job, 2, 2)
    listing.write("$(reboot)")
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait() == 75
    assert "beta can be used: the ranks are asked to save and to end (SIGUSR1), to go on as 3" in job.err
    assert "all ranks are started anew with 3 ranks on 2 hosts: after a save, which uses up no restart; the logs so far are in /" in job.err
    assert "alpha is listed no more, or with fewer slots" in job.err


def test_a_host_that_is_missing_at_the_start_is_taken_in_when_it_can_be_used(start_on: StartOn, hosts: Hosts, tmp_path: Path) -> None:
    """Alone until then on this machine. And when its agent is told to end, as where a machine is shut down, the job goes on without it."""
    gone = tmp_path / "gone"
    gone.write_text("beta")
    words = ("--min-ranks", "1", "--max-ranks", "2", "--discovery-interval", "0.2")
    job = start_on("localhost:1,beta:1", SAVING, *words, UNREACHABLE=str(gone))
    born(job, 1, 0)
    gone.unlink()
    born(job, 2, 1)
    gone.write_text("beta")
    os.kill(hosts.newest("beta")[1], signal.SIGTERM)
    born(job, 1, 2)
    gone.unlink()
    born(job, 2, 3)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 75
    assert "left out: the job goes on with 1 rank on 1 host" in job.err
    assert job.err.count("which uses up no restart") == 3


def test_a_script_that_does_not_save_is_left_in_peace(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    listing, go = Listing(tmp_path, "alpha:1"), tmp_path / "go"
    body = f"tell('born')\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    job = start(body, *listing.options, *hosts.rsh, "-x", "TELL", "--min-ranks", "1", ranks=0)
    job.expect("born", 1)
    listing.write("alpha:1", "beta:1")
    job.await_said("the ranks have not ended yet; a script lets hosts come and go if it catches SIGUSR1")
    go.touch()
    assert job.wait() == 0
    assert "started anew" not in job.err


def test_nothing_that_looks_for_hosts_outlives_a_killed_launcher(start: Start, hosts: Hosts, tmp_path: Path) -> None:
    """Neither a command that hangs, nor a remote shell to a host that does not answer."""
    ask = tmp_path / "ask"
    ask.write_text(
        f"#!/bin/sh\necho alpha:1\nmkdir {tmp_path}/once 2> /dev/null && exit\n"
        f"echo silent:1\nmkdir {tmp_path}/twice 2> /dev/null && exit\nsleep 600\n"
    )
    ask.chmod(0o755)
    words = ("--host-discovery", str(ask), "--discovery-interval", "0.1", "--min-ranks", "1", "-x", "TELL")
    job = start(SAVING, *words, *hosts.rsh, ranks=0)
    born(job, 1, 0)
    job.await_members("sleep 600", " silent ")
    kill(job.pid)
    assert job.gone_after([process.pid for process in job.members()]) < PROMISED_S
    assert hosts.left() == []


TRAINING = """\
import hashlib
from pathlib import Path

import torch

import hora
from hora.train.checkpoint.checkpointer import Checkpointer
from hora.train.preemption import EXIT_CODE, Preemption

generation, ranks = int(os.environ["HORA_GENERATION"]), int(os.environ["WORLD_SIZE"])


def train(checkpointer=None):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
    loader = hora.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randint(2, (96,))), global_batch_size=8, seed=3)
    parts, done = {"model": model, "optimizer": optimizer, "data": loader}, 0
    if checkpointer is not None and not checkpointer.is_empty():
        restored = checkpointer.load()
        for name, part in parts.items():
            part.load_state_dict(restored.state[name])
        done = restored.manifest.step
    for step in loader:
        if checkpointer is not None:
            await_fate(done)
        if preemption.requested:
            optimizer.request_stop()
        for inputs, targets in optimizer.micro_batches(step):
            optimizer.backward(torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), weight=len(targets))
        optimizer.step()
        done += 1
        if checkpointer is not None and (done % 3 == 0 or optimizer.stop_agreed):
            checkpointer.save({name: part.state_dict() for name, part in parts.items()}, step=done, epoch=0)
        if optimizer.stop_agreed:
            sys.exit(EXIT_CODE)
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()


def await_fate(done):
    if (generation, done) == (0, 5):
        tell("stuck")
        wait_forever()
    while (generation, done) == (1, 7) and not preemption.requested:
        time.sleep(0.01)


with Preemption() as preemption:
    hora.init(exact=True)
    if generation == 0:
        print("whole", train())
    tell("born", generation, os.getpid(), ranks)
    checkpointer = Checkpointer(Path(sys.argv[1]))
    checkpointer.prepare()
    print("parts", train(checkpointer))
    hora.shutdown()
"""


def test_an_exact_run_whose_host_dies_and_comes_back_keeps_its_bits(start_on: StartOn, hosts: Hosts, tmp_path: Path) -> None:
    """The run to which nothing happens is made by the same ranks before; torch is slow to load."""
    gone = tmp_path / "gone"
    words = ["--min-ranks", "1", "--max-ranks", "2", "--max-restarts", "1", "--discovery-interval", "0.2"]
    words += ["--log-dir", str(tmp_path / "logs"), "-x", f"TORCHINDUCTOR_CACHE_DIR={tmp_path / 'inductor'}"]
    job = start_on("alpha:1,beta:1", TRAINING, *words, UNREACHABLE=str(gone), words=[str(tmp_path / "checkpoints")])
    assert set(job.expect_any(4)) == {"born", "stuck"}
    gone.write_text("beta")
    for pid in hosts.newest("beta"):
        os.kill(pid, signal.SIGKILL)
    born(job, 1, 1)
    gone.unlink()
    born(job, 2, 2)
    assert job.wait() == 0
    assert f"with 1 rank on 1 host: restart 1 of at most 1; the logs so far are in {tmp_path / 'logs'}\n" in job.err
    assert (
        f"with 2 ranks on 2 hosts: after a save, which uses up no restart; the logs so far are in {tmp_path / 'logs' / 'restart-1'}\n"
        in job.err
    )
    said = sorted(line.split()[-2:] for line in job.out.splitlines())
    assert [word for word, _ in said] == ["parts", "parts", "whole", "whole"]
    assert len({digest for _, digest in said}) == 1
