"""The step model of sharded layers, against the papers' numbers and closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.conv import ConvSpec
from daskcnn.partition.proportions import speeds
from daskcnn.sharded.stages import eq2_elements
from daskcnn.show.report_tables import tables
from daskcnn.sim.cluster import Worker
from daskcnn.sim.papers_costs import Constants, Sharding, ceiling, costs, sharded_events

FIRST = ConvSpec(64, 32, 32, 3, 500, 5, 5, pad=(2, 2))
SECOND = ConvSpec(64, 16, 16, 500, 1500, 5, 5, pad=(2, 2))


def workers(*images_per_second: float, conv_share: float = 0.87, kind: str = "cpu") -> tuple[Worker, ...]:
    return tuple(
        Worker(name=f"w{i}", kind=kind, images_per_second=speed, conv_share=conv_share)  # type: ignore[arg-type]
        for i, speed in enumerate(images_per_second)
    )


def sharding(*images_per_second: float, bandwidth: float = math.inf, conv_share: float = 0.87) -> Sharding:
    both = workers(*images_per_second, conv_share=conv_share)
    return Sharding((FIRST, SECOND), ("conv1", "conv2"), both, bandwidth)


def test_eq_1_of_the_paper_s_example() -> None:
    """10, 15, 20 and 30 seconds are speeds of 3, 2, 1.5 and 1; with 10 and 20 it takes 6.67 s, 1.5 times as fast."""
    assert [3 * speed for speed in speeds([10, 15, 20, 30])] == pytest.approx([3, 2, 1.5, 1])
    spec = ConvSpec(1, 8, 8, 3, 3000, 3, 3)
    two = tuple(Worker(name=f"w{i}", images_per_second=1 / s, conv_seconds={"conv1": s}) for i, s in ((0, 10), (1, 20)))
    step = Sharding((spec,), ("conv1",), two).step()
    assert step.kernels == ((2000, 1000),)
    assert step.conv == pytest.approx(6.67, abs=0.005)
    assert 10 / step.conv == pytest.approx(1.5)


def test_eq_2_of_the_paper_s_largest_network() -> None:
    first = 32**2 * 3 * 64 + 5**2 * 500 * 3 + 32**2 * 500 * 64
    second = 16**2 * 500 * 64 + 5**2 * 1500 * 500 + 16**2 * 1500 * 64
    assert eq2_elements([FIRST, SECOND]) == first + second


def test_the_paper_s_ceilings() -> None:
    """It prints 7.76 for 13 % and about 4 at 25 %; two equal devices with 13 % serial cannot pass 1.77."""
    assert ceiling(0.13) == pytest.approx(7.76, rel=0.01)
    assert ceiling(0.25) == 4
    assert ceiling(0) == math.inf
    assert sharding(10, 10).speedup() == pytest.approx(1 / (0.13 + 0.87 / 2), rel=1e-3)
    assert sharding(10, 10).speedup() < 1.77 + 1e-2


@settings(max_examples=3, deadline=None)
@given(st.floats(0.3, 0.95), st.floats(1, 100))
def test_speed_up_goes_to_one_by_f_as_links_get_fast(share: float, speed: float) -> None:
    last = 0.0
    for bandwidth in (1e6, 1e9, 1e12, math.inf):
        many = sharding(*[speed] * 250, bandwidth=bandwidth, conv_share=share)
        assert many.serial == pytest.approx(1 - share)
        speedup = many.speedup()
        assert last < speedup < ceiling(many.serial) * 1.0001
        last = speedup
    # 250 workers have two kernels each of the first layer's 500, and six of the second's 1500
    assert last == pytest.approx(1 / (1 - share + share / 250), rel=1e-6)


def flattens_at(conv: float, fixed: float, each: float) -> int:
    """The number of equal workers at which a step of conv/k + fixed·(k - 1)/k + each·(k - 1) seconds is shortest.

    conv: one worker's convolutions; fixed: what all outputs take on the link, of which the home's own do not travel;
    each: what every further worker's inputs take. The step is shortest where the next worker would lengthen it:
    k·(k + 1) ≥ (conv - fixed)/each.
    """
    return 1 if conv <= fixed else math.ceil((math.sqrt(1 + 4 * (conv - fixed) / each) - 1) / 2)


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10])
def test_more_workers_stop_helping_at_the_count_of_the_closed_form(bandwidth: float) -> None:
    """Every worker gets all inputs and gives back the gradients of the second's: that grows with k, conv/k falls."""
    spec = SECOND
    inputs = 4 * spec.H * spec.W * spec.C * spec.N / bandwidth
    outputs = 2 * 4 * spec.out_H * spec.out_W * spec.K * spec.N / bandwidth
    conv = spec.N * 0.87 / 10
    one = Sharding((spec,), ("conv1",), workers(*[10.0]), bandwidth)
    predicted = min(flattens_at(conv, outputs, inputs), 199)
    near = range(max(1, predicted - 12), min(199, predicted + 12) + 1)
    counts = sorted({1, 2, 5, 10, 20, 50, 100, 150, 199, *near})
    times = {k: Sharding((spec,), one.names, workers(*[10.0] * k), bandwidth).step().seconds for k in counts}
    assert one.step().seconds == pytest.approx(64 / 10)
    for k in (2, 5, 50):
        expected = conv / k + outputs * (k - 1) / k + inputs * (k - 1) + 0.13 * 6.4
        assert times[k] == pytest.approx(expected, rel=0.01)
    assert min(times, key=times.__getitem__) == pytest.approx(predicted, abs=max(1, 0.05 * predicted))


@given(st.floats(0.01, 100), st.floats(0, 1), st.floats(0.001, 1))
def test_the_closed_form_is_where_the_next_worker_lengthens_a_step(conv: float, fixed: float, each: float) -> None:
    def step(k: int) -> float:
        return conv / k + fixed * (k - 1) / k + each * (k - 1)

    k = flattens_at(conv, fixed, each)
    assert step(k) <= step(k + 1) * (1 + 1e-12)
    assert k == 1 or step(k - 1) >= step(k) * (1 - 1e-12)


def test_a_gpu_takes_most_kernels_and_is_home() -> None:
    both = (*workers(10.0), Worker(name="g", kind="gpu", images_per_second=90.0, conv_share=0.5))
    found = Sharding((FIRST, SECOND), ("conv1", "conv2"), both)
    step = found.step()
    assert found.home == 1
    cpu, gpu = 0.87 / 10, 0.5 / 90
    for kernels, spec in zip(step.kernels, (FIRST, SECOND), strict=True):
        assert sum(kernels) == spec.K
        assert kernels[1] / spec.K == pytest.approx((1 / gpu) / (1 / gpu + 1 / cpu), abs=1 / spec.K)
    assert step.up[1] == step.down[1] == 0
    assert step.comp == pytest.approx(0.5 * 64 / 90)


def test_the_paper_s_count_does_not_grow_with_the_workers() -> None:
    link = 5e6
    comm = 8 * eq2_elements([FIRST, SECOND]) / link
    assert sharding(1.0).paper_speedup(link) == pytest.approx(1)
    for k in (2, 8, 32):
        expected = 64 / (comm + 64 * 0.13 + 64 * 0.87 / k)
        assert sharding(*[1.0] * k).paper_speedup(link) == pytest.approx(expected, rel=0.03)


def test_overheads_and_latencies_come_on_top() -> None:
    plain = sharding(10, 10, bandwidth=1e9)
    slow = tuple(worker.model_copy(update={"latency": 0.1}) for worker in plain.workers)
    late = Sharding(plain.specs, plain.names, slow, plain.bandwidth, overhead=0.5)
    assert late.step().seconds - plain.step().seconds == pytest.approx(0.5 + 7 * 0.1)


def test_a_report_s_tables_can_be_made_of_it() -> None:
    found = sharding(10, 30, bandwidth=1e9)
    about = {"parameters": 1000, "validation_samples": 10}
    report = tables(sharded_events(found, 640, 3, about))
    assert report.seconds == pytest.approx(3 * 10 * found.step().seconds)
    assert report.traffic.up == 30 * sum(found.step().up)
    assert report.kernels["w1"] == {"conv1": found.step().kernels[0][1], "conv2": found.step().kernels[1][1]}
    assert report.status == "done"


# --- Hegde and Usmani ---


def constants(**changes: float) -> Constants:
    usual = {"k": 8, "p": 1000, "D": 640, "q": 4, "theta": 100, "T": 2.0, "tau": 0.1, "add": 1e-6, "B": 4e3, "L": 0.5}
    return Constants(**{**usual, "itemsize": 4, "sample_bytes": 10, "epsilon": math.exp(-3), **changes})  # type: ignore[arg-type]


def test_costs_by_hand() -> None:
    found = {(cost.rule, cost.what): cost.value for cost in costs(constants())}
    adding, meeting = 3 * 1000 * 1e-6, 2 * 3 * (0.5 + 1.0)
    assert found == {
        ("parallel-sgd", "computation"): pytest.approx(adding / 4 + 3 * 2.0),
        ("parallel-sgd", "shuffle"): 6400,
        ("parallel-sgd", "communication"): 2 * 4000 * 7,
        ("parallel-sgd", "communication time"): pytest.approx(meeting),
        ("admm", "computation"): pytest.approx(3 * adding + 3 * 2.0),
        ("admm", "communication"): pytest.approx(3 * 2 * 4000 * 7),
        ("admm", "communication time"): pytest.approx(3 * meeting),
        ("downpour", "one update"): 2.1,
        ("downpour", "communication"): 400_000,
        ("downpour", "all updates"): pytest.approx(100 * 2.1 / 8),
    }


def test_downpour_s_time_stops_falling_at_its_saturation() -> None:
    assert constants().saturation == pytest.approx(20)
    assert constants(tau=0.0).saturation is None

    def all_updates(k: int) -> float:
        return next(cost.value for cost in costs(constants(k=k)) if cost.what == "all updates")

    times = {k: all_updates(k) for k in (1, 10, 20, 22, 40)}
    assert times[1] > times[10] > times[20] > times[22] == times[40] == pytest.approx(100 * 0.1)


def test_one_worker_sends_nothing() -> None:
    alone = {(cost.rule, cost.what): cost.value for cost in costs(constants(k=1))}
    assert alone["parallel-sgd", "communication"] == alone["admm", "communication time"] == 0
