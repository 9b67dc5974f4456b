import pytest

from hora.diag.report.slices import Part, cut, durations_s, travels
from hora.events import Mark
from hora.plan.buckets import BucketFacts

FIRST, SECOND = BucketFacts(0, 0, ("b",), 100), BucketFacts(0, 1, ("a",), 300)


def parts_of(begin_s: float = 0.0, **times: float) -> dict[str, float]:
    """Seconds of each part of a step with these marks; one may come twice, with a figure behind its name."""
    marks = [Mark[name.rstrip("0123456789").upper()] for name in times]
    found = durations_s(cut(marks, list(times.values()), begin_s))
    assert sum(found) == pytest.approx(list(times.values())[-1] - begin_s)
    return {Part(part).name.lower(): seconds for part, seconds in enumerate(found) if seconds > 0}


def test_a_step_of_an_explicit_window_is_cut_at_its_marks():
    assert parts_of(
        data_begin=1, data_end=3, window_begin=3, data_begin2=4, data_end2=6, last_backward=8, agree_begin=9, agree_end=12,
        bucket_sent=12, backward_end=20, bucket_summed=25, sums_end=26, update_end=30,
    ) == {"outside": 1, "data": 4, "compute": 1 + 3 + 8, "agreement": 3, "communication": 6, "update": 4}  # fmt: skip


def test_what_is_before_the_backward_of_a_plain_loop_is_forward():
    assert parts_of(last_backward=5, backward_end=8, sums_end=9, update_end=10, begin_s=1.0) == {
        "compute": 7, "communication": 1, "update": 1,
    }  # fmt: skip


def test_agreement_after_backward_is_no_communication():
    assert parts_of(backward_end=5, agree_begin=5, agree_end=7, sums_end=10, update_end=10) == {
        "compute": 5, "agreement": 2, "communication": 3,
    }  # fmt: skip


def test_parameters_that_are_gathered_are_communication_inside_the_update():
    assert parts_of(backward_end=5, sums_end=6, gather_begin=8, gather_end=9, gather_begin2=9, gather_end2=11, update_end=12) == {
        "compute": 5, "communication": 1 + 3, "update": 3,
    }  # fmt: skip


def test_a_replayed_step_is_compute():
    assert parts_of(
        window_begin=1, data_begin=1, data_end=2, agree_begin=2, agree_end=3, device_begin=3, device_end=7, replay_begin=8, replay_end=9,
        update_end=10,
    ) == {"outside": 1, "data": 1, "agreement": 1, "device": 4, "compute": 2, "update": 1}  # fmt: skip


def test_the_update_of_a_second_optimizer_counts_with_the_next_step():
    assert parts_of(update_end=2, window_begin=3, backward_end=5, sums_end=6, update_end2=7) == {
        "update": 2 + 1, "outside": 1, "compute": 2, "communication": 1,
    }  # fmt: skip


def test_marks_of_several_streams_do_not_run_backwards():
    assert parts_of(backward_end=5, sums_end=4, update_end=6) == {"compute": 5, "update": 1}


def test_a_bucket_is_waited_for_from_the_end_of_backward_and_from_the_bucket_before():
    marks = [Mark.BUCKET_SENT, Mark.BUCKET_SENT, Mark.BACKWARD_END, Mark.BUCKET_SUMMED, Mark.BUCKET_SUMMED]
    first, second = travels(marks, [1.0, 9.0, 10.0, 12.0, 20.0], [FIRST, SECOND, None, FIRST, SECOND])
    assert (first.bucket, first.waited_s, first.took_s) == (FIRST, 2.0, 11.0)
    assert (second.bucket, second.waited_s, second.took_s) == (SECOND, 8.0, 8.0), "its way was free when the first had arrived"


def test_how_long_a_hidden_bucket_took_is_not_told():
    marks = [Mark.BUCKET_SENT, Mark.BUCKET_SENT, Mark.BACKWARD_END, Mark.BUCKET_SUMMED, Mark.BUCKET_SUMMED]
    first, second = travels(marks, [1.0, 9.0, 10.0, 10.00001, 20.0], [FIRST, SECOND, None, FIRST, SECOND])
    assert first.took_s == 0.0
    assert second.took_s == 11.0


def test_buckets_that_leave_after_backward_are_waited_for_from_when_they_left():
    marks = [Mark.BACKWARD_END, Mark.BUCKET_SENT, Mark.BUCKET_SUMMED, Mark.BUCKET_SENT, Mark.BUCKET_SUMMED]
    first, second = travels(marks, [10.0, 11.0, 12.0, 13.0, 15.0], [None, FIRST, FIRST, SECOND, SECOND])
    assert (first.waited_s, first.took_s, second.waited_s, second.took_s) == (1.0, 1.0, 2.0, 2.0)
