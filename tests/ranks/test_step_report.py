"""`hora.report()`: what is planted is what it names. Delays are long beside what a loaded machine adds, and shares are compared loosely."""

import contextlib
import json
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hora
from hora import env, events
from hora.diag.report import recording
from hora.diag.report.recorder import Recorder
from hora.diag.report.slices import Part
from hora.errors import ConfigError
from hora.launch.report_words import ReportWords
from hora.sync.gradients import GradientBucket
from hora.sync.sharded import ShardedBucket
from hora.testing import run_ranks

DELAY_S = 0.06
STEPS = 6


class Sleepy(nn.Module):
    """Passes its input on, slowly where it is told to: in forward, or in backward."""

    def __init__(self, forward_s: float = 0.0, backward_s: float = 0.0):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, inputs):
        time.sleep(self.forward_s)
        if inputs.requires_grad and self.backward_s:
            inputs.register_hook(lambda _: time.sleep(self.backward_s))
        return inputs


class Samples(torch.utils.data.Dataset):
    def __init__(self, delay_s: float = 0.0):
        self.delay_s = delay_s

    def __len__(self):
        return STEPS * hora.world_size()

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        return torch.tensor([index % 7, index % 5]), index % 3


def model_of(sleepy: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4000, 8), sleepy, nn.Flatten(), nn.Linear(16, 3))


def loss_fn(model, batch, state):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets), {}, state


def train(model: nn.Module, loader, how: str = "explicit", **options) -> None:
    optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-2), model, bucket_cap_bytes=200, **options)
    train_step = hora.TrainStep(model, loss_fn, optimizer) if how == "train step" else None
    for step in loader:
        if train_step is not None:
            train_step(step)
            continue
        if how == "plain":
            for inputs, targets in step:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
        else:
            for batch in optimizer.micro_batches(step):
                loss, weight, _, _ = loss_fn(model, batch, None)
                optimizer.backward(loss, weight=weight)
        optimizer.step()


def report_of(sleepy: nn.Module | None = None, delay_s: float = 0.0, how: str = "explicit", **options):
    with events.observe(Recorder(warm_up=1)):
        train(model_of(sleepy or Sleepy()), hora.DataLoader(Samples(delay_s), global_batch_size=hora.world_size()), how, **options)
        return hora.report()


@run_ranks(2)
@pytest.mark.parametrize("how", ["explicit", "plain", "train step"])
def test_a_slow_rank_is_named_with_compute(how):
    report = report_of(Sleepy(forward_s=DELAY_S * hora.rank()), how=how)
    assert (report.late.rank, report.late.because) == (1, "compute")
    assert report.late.steps > 0.7
    assert 0.5 * DELAY_S < report.late.by_s < 3 * DELAY_S
    assert report.times.compute.share > 0.5
    assert report.times.communication.share < 0.3, "waiting for a rank is not communication"
    assert report.advice.startswith("rank 1 comes last to")
    assert [rank.last > 0.7 for rank in report.ranks] == [False, True]
    assert "comes last" in str(report)


@run_ranks(2)
def test_a_rank_that_is_slow_after_its_first_sums_have_left_is_named_too():
    report = report_of(Sleepy(backward_s=DELAY_S * (1 - hora.rank())))
    assert (report.late.rank, report.late.because) == (0, "compute")
    assert report.times.communication.share < 0.3


@run_ranks(1, 2)
@pytest.mark.parametrize("how", ["explicit", "train step"])
def test_a_slow_loader_is_named_as_data_wait(how, world_size):
    report = report_of(delay_s=3 * DELAY_S, how=how)
    assert report.times.data.share > 0.6
    assert report.advice.startswith("data wait is")
    assert "num_workers" in report.advice
    assert (report.steps, report.left_out, report.world_size) == (STEPS - 1, 1, world_size)
    if world_size == 1:
        assert (report.late, report.bandwidth, report.bucket) == (None, None, None)
        assert "agreement" not in str(report)


@run_ranks(2)
def test_a_slow_loader_of_one_rank_is_named_with_the_rank():
    report = report_of(delay_s=DELAY_S * hora.rank())
    assert (report.late.rank, report.late.because) == (1, "data")
    assert report.advice.startswith("rank 1 comes last to" if report.late.share > report.times.data.share else "data wait is")


class Slow:
    """A sum that takes its time."""

    def __init__(self, work):
        self._work = work

    def wait(self):
        time.sleep(DELAY_S)
        return self._work.wait()


@run_ranks(2)
@pytest.mark.parametrize("strategy", ["overlap", "deferred", "sharded"])
def test_a_slow_sum_is_named_with_its_bucket(strategy):
    kind = ShardedBucket if strategy == "sharded" else GradientBucket
    begin_sum = kind.begin_sum

    def begin(bucket, **how):
        work = begin_sum(bucket, **how)
        return Slow(work) if "0.weight" in bucket.facts.names else work

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(kind, "begin_sum", begin)
        report = report_of(strategy=strategy)
    assert report.times.communication.share > 0.5
    assert report.bucket.names == ("0.weight",)
    assert report.bucket.size_bytes >= 4000 * 8 * 4
    assert 0.8 * DELAY_S < report.bucket.wait.median_s < 3 * DELAY_S
    assert "exposed communication is" in report.advice
    assert "0.weight" in report.advice
    assert 0 < report.bandwidth.achieved < 2 * report.bandwidth.bucket_bytes / DELAY_S / 1e9
    assert report.late is None or report.late.share < report.times.communication.share


@run_ranks(1, 2)
@pytest.mark.parametrize("how", ["explicit", "plain"])
def test_parts_add_up_to_the_time_that_has_passed(how):
    loader = hora.DataLoader(Samples(), global_batch_size=hora.world_size())
    model = model_of(Sleepy(forward_s=0.02))
    with events.observe(Recorder(warm_up=0)) as recorder:
        begun_s = time.perf_counter()
        train(model, loader, how)
        passed_s = time.perf_counter() - begun_s
        report = hora.report()
    parts_s = sum(end_s - begin_s for step in recorder.steps for _, begin_s, end_s in step.host_slices())
    assert 0.8 * passed_s < parts_s < 1.01 * passed_s
    for times in (report.times, *(rank.times for rank in report.ranks)):
        shares = [getattr(times, part.name.lower()).share for part in Part]
        assert sum(shares) == pytest.approx(1.0)
        assert times.step.share == 1.0
        assert times.compute.share > 0.2


@run_ranks(2)
def test_two_optimizers_of_a_model_make_one_step():
    model = model_of(Sleepy())
    first = hora.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), 0.1), model)
    second = hora.DistributedOptimizer(torch.optim.SGD(model[3].parameters(), 0.1), model)
    with events.observe(Recorder(warm_up=0)):
        for _ in range(3):
            model(torch.tensor([[1, 2]])).sum().backward()
            for optimizer in (first, second):
                optimizer.step()
            first.zero_grad()
        assert hora.report().steps == 3


@run_ranks(1, 2)
def test_nothing_is_recorded_where_nobody_asked_for_it():
    train(model_of(Sleepy()), hora.DataLoader(Samples(), global_batch_size=hora.world_size()))
    assert type(events.observer()) is events.Observer
    with pytest.raises(ConfigError, match="none were on rank 0: call hora.record_steps"):
        hora.report()


@run_ranks(2)
def test_a_rank_that_records_nothing_is_named_on_all():
    recording = events.observe(Recorder(0)) if hora.rank() == 0 else contextlib.nullcontext()
    with recording, pytest.raises(ConfigError, match="none were on rank 1"):
        hora.report()
    with events.observe(Recorder(0)), pytest.raises(ConfigError, match="there was none"):
        hora.report()


def job(files: str) -> dict:
    """A job as that of a script under `hora run --report`: everything from the variables."""
    assert isinstance(events.observer(), Recorder)
    train(model_of(Sleepy(forward_s=0.01)), hora.DataLoader(Samples(), global_batch_size=hora.world_size()))
    before = sorted(path.name for path in Path(files).iterdir())
    hora.shutdown()
    return {"before": before, "still": type(events.observer()) is not events.Observer}


def test_files_appear_when_the_job_ends(spawn_ranks, tmp_path):
    environ = {env.REPORT: "1", env.REPORT_JSON: str(tmp_path / "report.json"), env.TRACE: str(tmp_path / "trace.json")}
    ranks = spawn_ranks(2, job, environ=environ, files=str(tmp_path))
    assert [outcome.result for outcome in ranks.wait()] == [{"before": [], "still": False}] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "trace.json"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["world_size"], report["steps"], report["left_out"]) == (2, 3, 3)
    assert report["times"]["compute"]["share"] > 0.1
    assert report["advice"]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    assert {event["args"]["name"] for event in trace if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    names = {event["name"] for event in trace}
    assert {"step 0", "step 5", "compute", "data", "update", "bucket 0", "bucket 1"} <= names
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in trace if event["ph"] == "X")


@run_ranks(2)
def test_a_report_that_cannot_be_written_leaves_nothing_and_fails_nothing(tmp_path):
    words = ReportWords(report_json=tmp_path / "report.json")
    with events.observe(Recorder(0)), pytest.MonkeyPatch.context() as monkeypatch:
        train(model_of(Sleepy()), hora.DataLoader(Samples(), global_batch_size=hora.world_size()))
        warned = []
        monkeypatch.setattr(recording.log.get_logger(), "warning", lambda *words: warned.append(words))
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        recording._tell(words)
    told = f"cannot write {tmp_path / 'report.json'}: no room; name a file in a directory that exists and may be written"
    assert [str(error) for _, error in warned] == ([told] if hora.rank() == 0 else [])
    hora.barrier()  # rank 0 has taken its draft away
    assert list(tmp_path.iterdir()) == []


def leaves_early() -> None:
    model = nn.Linear(4, 2)
    optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for step in range(3):
        if (step, hora.rank()) == (2, 1):
            hora.shutdown()
            return
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_leaves_early_is_told_of_as_without_a_report(spawn_ranks):
    stays, leaves = spawn_ranks(2, leaves_early, environ={env.REPORT: "1"}).wait()
    assert leaves.kind == "passed"
    assert "PeerLost: rank 0 lost rank 1 in update" in stays.text
    assert "Rank 1 has ended or called hora.shutdown" in stays.text


@run_ranks(2)
@pytest.mark.parametrize("word", ["report_json", "trace"])
def test_a_file_that_cannot_be_written_is_refused_before_the_first_step(word, tmp_path):
    with pytest.raises(ConfigError, match=r"--(report-json|trace) cannot write .*missing"):
        recording.follow(ReportWords(**{word: tmp_path / "missing" / "file.json"}))
    assert type(events.observer()) is events.Observer
    assert hora.session().before_leaving == []


def refused() -> bool:
    return hora.is_initialized()


def test_a_job_with_such_a_file_does_not_begin(spawn_ranks, tmp_path):
    ranks = spawn_ranks(2, refused, environ={env.TRACE: str(tmp_path / "missing" / "trace.json")})
    for outcome in ranks.wait():
        assert outcome.kind == "failed"
        assert "--trace cannot write" in outcome.text


@run_ranks(1)
def test_recording_begins_anew():
    with events.observe(Recorder(3)) as recorder:
        train(model_of(Sleepy()), hora.DataLoader(Samples(), global_batch_size=1))
        hora.record_steps(warm_up=0)
        assert (recorder.num_steps, recorder.warm_up) == (0, 0)
    with events.observe(Other()), pytest.raises(ConfigError, match="something else listens"):
        hora.record_steps()
    with pytest.raises(ConfigError, match="warm_up must be a number of steps from 0, but is -1"):
        hora.record_steps(warm_up=-1)


class Other(events.Observer):
    pass
