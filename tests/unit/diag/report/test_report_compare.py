from dataclasses import replace

import pytest
from report_kit import EMBEDDING, record

from hora.diag.report.advice import advise
from hora.diag.report.compare import Setting, compare
from hora.diag.report.show import show
from hora.errors import ConfigError

CPU, GPU = Setting("gloo", "cpu"), Setting("nccl", "cuda")
BALANCED = {"data": 0.001, "compute": 0.09, "communication": 0.005, "update": 0.004}


def told(*records, setting=CPU):
    report = compare(records, setting)
    return replace(report, advice=advise(report))


def test_times_are_those_of_the_rank_for_which_nobody_waited():
    late = {"data": 0.01, "compute": 0.06, "communication": 0.02, "update": 0.01}
    early = {"data": 0.01, "compute": 0.03, "agreement": 0.01, "communication": 0.04, "update": 0.01}
    report = told(record(*[early] * 10), record(*[late] * 10))
    assert report.times.step.median_s == pytest.approx(0.1)
    assert report.times.compute.median_s == pytest.approx(0.06)
    assert report.times.communication.share == pytest.approx(0.2)
    assert (report.late.rank, report.late.because, report.late.steps) == (1, "compute", 1.0)
    assert report.late.by_s == pytest.approx(0.03)
    assert report.advice == (
        "rank 1 comes last to 100 % of the sums, 30.0 ms after the others, because of its compute (60.0 ms, 30.0 ms on the others, 100 % longer): "
        "look at what else runs on its processor, or whether its samples are longer"
    )


def test_ranks_that_take_turns_are_not_blamed_one_by_one():
    late, early = {"compute": 0.09, "communication": 0.01}, {"compute": 0.03, "communication": 0.07}
    report = told(record(*[late, early, early] * 10), record(*[early, late, early] * 10), record(*[early, early, late] * 10))
    assert (report.late.rank, report.late.because) == (None, "compute")
    assert "in turns, because of its compute" in report.advice


def test_balanced_ranks_are_not_late():
    report = told(record(*[BALANCED] * 10), record(*[BALANCED] * 10))
    assert report.late is None
    assert report.advice == "nothing stands out: compute is 90 % of a step"


def test_a_wait_for_the_loader_is_named():
    report = told(record(*[BALANCED | {"data": 0.07}] * 10), record(*[BALANCED | {"data": 0.07}] * 10))
    assert report.advice.startswith("data wait is 41 % of a step: give the loader more workers")


def test_rare_long_waits_count_for_what_they_take():
    steps = [BALANCED, BALANCED, BALANCED, BALANCED | {"data": 0.4}] * 5
    report = told(record(*steps))
    assert report.times.data.median_s == pytest.approx(0.001)
    assert report.advice.startswith("data wait is 50 % of a step")


def test_exposed_communication_is_named_with_its_bucket_and_its_bandwidth():
    step = {"compute": 0.06, "communication": 0.04, "waited": [0.005, 0.035], "took": 0.039, "sent_bytes": 39e6, "num_travels": 1}
    report = told(record(*[step] * 4), record(*[step | {"took": 0.05}] * 4))
    assert (report.bucket.index, report.bucket.names, report.bucket.size_bytes) == (1, EMBEDDING.names, 39_000_000)
    assert report.bandwidth.achieved == pytest.approx(1.0), "of the rank that waited for nobody"
    assert report.bandwidth.bucket_bytes == 39_000_000
    assert report.advice.startswith(
        "exposed communication is 40 % of a step, most of it for bucket 1 (embedding.weight; 39 MB), 35.0 ms: more micro-batches a step"
    )
    assert "bucket_cap_bytes" not in report.advice, "a parameter by itself cannot leave in parts"
    assert "bucket_cap_bytes" in told(*[record(*[step | {"waited": [0.035, 0.005]}] * 4)] * 2).advice
    assert "sums: 1 GB/s, in buckets of 39 MB" in show(report)
    measured = replace(report, bandwidth=replace(report.bandwidth, measured=4.0))
    assert "sums: 1 GB/s, 25 % of what hora bench allreduce measured" in show(measured)


def test_time_between_steps_is_named():
    assert told(record(*[BALANCED | {"outside": 0.1}] * 4)).advice.startswith("50 % of the time lies between steps")


def test_a_large_update_is_dealt_out():
    steps = [{"compute": 0.05, "update": 0.05}] * 4
    assert (
        told(record(*steps)).advice == "the update is 50 % of a step: more micro-batches a step (a larger global_batch_size) make it rarer"
    )
    assert 'strategy="sharded"' in told(record(*steps), record(*steps)).advice


def test_a_gpu_that_waits_for_its_host_wants_graphs():
    report = told(record(*[BALANCED | {"host": 0.09, "host_bound": 1.0}] * 4), setting=GPU)
    assert (report.host.median_s, report.host_bound) == (pytest.approx(0.09), 1.0)
    assert "hora.TrainStep replays steps from a CUDA graph" in report.advice
    assert "the GPU waited for it in 100 % of the steps" in show(report)


def test_replayed_steps_are_shown_as_graphs():
    report = told(record(*[BALANCED | {"replayed": 1.0, "host": 0.001}] * 4), setting=GPU)
    assert report.replayed == 1.0
    assert "compute (whole graphs)" in show(report)


@pytest.mark.parametrize(("dropped", "steps", "expected"), [(0, 10, 3), (0, 4, 2), (0, 1, 0), (2, 10, 3), (100, 10, 100)])
def test_first_steps_are_left_out_but_never_more_than_half(dropped, steps, expected):
    report = told(record(*[BALANCED] * steps, warm_up=3, dropped=dropped))
    assert report.left_out == expected
    assert report.steps == steps + dropped - expected


def test_ranks_must_have_recorded_the_same_steps():
    for counts, found in {(0, 0): "there was none", (3, 4): "recorded 3, 4 of them"}.items():
        with pytest.raises(ConfigError, match=found):
            compare([record(*[BALANCED] * count) for count in counts], CPU)
