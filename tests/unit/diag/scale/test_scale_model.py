"""The model behind `hora scale`: sums fitted to latency and bandwidth, and steps on more ranks."""

import math
from dataclasses import replace

import pytest

from hora.diag.scale.limits import losses, say_limit
from hora.diag.scale.point import PARTS, Point, efficiency, point_of, speed_up
from hora.diag.scale.predict import predict
from hora.diag.scale.result import conclude
from hora.diag.scale.wire import Sum, fit, fit_line, ring, sums_of, tree

LATENCY_S, BYTE_S = 2e-5, 1e-10
MIB = 2**20


def ring_sums(*ranks: int, latency_s: float = LATENCY_S, byte_s: float = BYTE_S) -> list[Sum]:
    sizes = 4096, 2**16, MIB, 16 * MIB
    return [Sum(n, 1, size, 2 * (n - 1) * latency_s + 2 * (n - 1) / n * size * byte_s) for n in ranks for size in sizes]


def point(
    ranks: int, *, compute: float = 0.010, communication: float = 0.0, steps=None, late=0.0, sums=(4 * MIB,) * 4, **parts: float
) -> Point:
    parts_s = dict.fromkeys(PARTS, 0.0) | {"compute": compute, "communication": communication} | parts
    total = sum(parts_s.values())
    return Point(ranks, steps or (total,), parts_s, late, sums if ranks > 1 else (), "gloo", "cpu", 0.0, "advice", 40)


def test_latency_and_bandwidth_of_a_ring_are_found_again():
    line = fit_line(ring, ring_sums(2, 4))
    assert (line.latency_s, line.byte_s) == pytest.approx((LATENCY_S, BYTE_S))
    assert line.error < 1e-9
    assert line.took_s(8, MIB) == pytest.approx(14 * LATENCY_S + 14 / 8 * MIB * BYTE_S)


def test_no_number_of_a_fit_is_below_zero():
    flat = [Sum(2, 1, size, 1e-3) for size in (1024, 2**20)]
    falling = [Sum(2, 1, 1024, 1e-3), Sum(2, 1, 2**20, 1e-4)]
    for sums in (flat, falling):
        line = fit_line(ring, sums)
        assert line.latency_s >= 0
        assert line.byte_s >= 0


def test_a_tree_needs_as_many_messages_as_the_logarithm_says():
    assert [tree(n, 0)[0] for n in (1, 2, 4, 5, 1024)] == [0, 2, 4, 6, 20]


def test_hierarchical_tells_far_from_near():
    near = ring_sums(2, 4)
    inside = fit_line(ring, near)
    far = [
        Sum(8, 2, size, inside.took_s(4, size) + 2 * 5e-4 + size * 1e-9)  # two nodes of four: a ring of two between them
        for size in (4096, 2**16, MIB, 16 * MIB)
    ]
    (wire,) = fit([*near, *far])
    assert (wire.name, wire.ranks_per_node) == ("hierarchical", 4)
    assert wire.far is not None
    assert (wire.far.latency_s, wire.far.byte_s) == pytest.approx((5e-4, 1e-9), rel=1e-6)
    assert wire.took_s(16, MIB) == pytest.approx(inside.took_s(4, MIB) + 6 * 5e-4 + 1.5 * MIB * 1e-9)
    assert wire.took_s(2, MIB) == pytest.approx(inside.took_s(2, MIB))


def test_only_the_backends_own_sums_outside_graphs_count():
    row = {
        "backend": "gloo",
        "device": "cpu",
        "algorithm": "native",
        "captured": False,
        "ranks": 2,
        "nodes": 1,
        "bytes": 8,
        "median_us": 5.0,
    }
    others = [row | {"algorithm": "ring"}, row | {"backend": "shm"}, row | {"captured": True}, row | {"device": "cuda"}]
    assert sums_of([row, *others], "gloo", "cpu") == [Sum(2, 1, 8, 5e-6)]


def test_weak_scaling_without_sums_to_wait_for_stays_as_it_is():
    points = [point(1), point(2), point(4)]
    wires = fit(ring_sums(2, 4, byte_s=1e-13, latency_s=1e-9))
    found = predict(points, wires, "weak", 64)
    assert found.step_s == pytest.approx(0.010, rel=1e-3)
    assert efficiency("weak", points[0], 64, found.step_s) == pytest.approx(1.0, rel=1e-3)


def test_exposed_sums_grow_as_the_ring_says():
    wires = [wire for wire in fit(ring_sums(2, 4)) if wire.name == "ring"]
    total = 4 * wires[0].took_s(4, 4 * MIB)
    points = [point(1), point(4, communication=total)]  # nothing is hidden
    found = predict(points, wires, "weak", 16)
    messages = wires[0].messages_s(16) - wires[0].messages_s(4)
    assert found.step_s == pytest.approx(0.010 + 4 * wires[0].took_s(16, 4 * MIB) + messages)


def test_what_backward_hid_it_goes_on_hiding():
    wires = [wire for wire in fit(ring_sums(2, 4)) if wire.name == "ring"]
    total = 4 * wires[0].took_s(4, 4 * MIB)
    points = [point(1), point(4, communication=0.25 * total)]
    found = predict(points, wires, "weak", 16)
    messages = wires[0].messages_s(16) - wires[0].messages_s(4)
    hidden = 0.75 * total
    assert found.step_s == pytest.approx(0.010 + 4 * wires[0].took_s(16, 4 * MIB) - hidden + messages)


def test_strong_scaling_keeps_what_is_not_dealt_out():
    always, dealt = 0.002, 0.008
    points = [point(n, compute=always + dealt / n, sums=()) for n in (1, 2, 4)]
    found = predict(points, [], "strong", 16)
    assert found.step_s == pytest.approx(always + dealt / 16)
    assert speed_up("strong", points[0], 16, found.step_s) == pytest.approx(0.010 / (always + dealt / 16))


def test_the_largest_number_is_predicted_from_the_smaller_ones():
    always, dealt = 0.001, 0.012
    points = [point(n, compute=always + dealt / n, sums=()) for n in (1, 2, 4)]
    result = conclude("train", "strong", points, [], [], to=32)
    assert result.tried is not None
    assert result.tried.ranks == 4
    assert result.tried_error == pytest.approx(0.0, abs=1e-9)
    assert [prediction.ranks for prediction in result.predictions] == [8, 16, 32]
    whats = [(m.variant, m.workload.ranks) for m in result.measurements()]
    assert whats == [*(("step", n) for n in (1, 2, 4)), *(("predicted", n) for n in (8, 16, 32)), ("scale_prediction_error_4", 4)]


def test_two_numbers_are_too_few_to_try_a_prediction():
    result = conclude("train", "weak", [point(1), point(2)], [], [], to=4)
    assert result.tried is None
    assert [prediction.ranks for prediction in result.predictions] == [4]


def test_a_prediction_is_no_surer_than_the_runs_were():
    points = [point(1), replace(point(2), step_s=(0.008, 0.010, 0.012))]
    found = predict(points, [], "weak", 8)
    assert found.low_s <= 0.8 * found.step_s + 1e-12
    assert found.high_s >= 1.2 * found.step_s - 1e-12
    wild = predict([point(1), replace(point(2), step_s=(0.001, 0.010, 0.030))], [], "weak", 8)
    assert 0 < wild.low_s < 0.5 * wild.step_s, "a step takes some time, however much the runs differ"


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (point(4, communication=0.005), "sums that backward does not hide"),
        (point(4, compute=0.016), "forward and backward"),
        (point(4, compute=0.016, late=0.3), "ranks that come late"),
        (point(4, data=0.004), "waiting for data"),
        (point(4, compute=0.0101), "Nothing costs more"),
    ],
)
def test_what_costs_most_is_named(last, words):
    assert words in say_limit(losses([point(1), last], "weak"), "weak", 4)


def test_a_point_is_made_of_the_medians_of_its_runs():
    def report(step_s: float) -> dict:
        times = {part: {"median_s": step_s / 10} for part in PARTS} | {"step": {"median_s": step_s}}
        return {
            "times": times, "late": None, "sums_bytes": [8], "backend": "gloo", "device": "cpu", "replayed": 0.0, "advice": f"{step_s}", "steps": 30,
        }  # fmt: skip

    found = point_of(2, [report(s) for s in (0.3, 0.1, 0.2)])
    assert (found.median_s, found.parts_s["data"], found.advice, found.sums_bytes) == (0.2, pytest.approx(0.02), "0.2", (8,))
    assert math.isclose(found.spread, 0.5)
