"""The step model of our own sharding scheme: closed forms, the count of what travels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.job.network import convolutions
from daskcnn.nn import build_model
from daskcnn.sharded.balance import traffic, weight_traffic
from daskcnn.show.report_tables import StepParts, tables
from daskcnn.sim.cluster import Worker
from daskcnn.sim.papers_costs import sharded_events
from daskcnn.sim.sharded_step import Direct

IMAGE = (32, 32, 3)
BATCH = 64
CONV1, CONV2, REST = 0.002, 0.006, 0.002
"""Seconds a sample of the first layer's stage, the second's, and of all else, of a worker of speed 1."""


def worker(name: str, speed: float = 1.0, **more: Any) -> Worker:
    seconds = {"conv1": CONV1 / speed, "conv2": CONV2 / speed}
    return Worker(name=name, images_per_second=speed / (CONV1 + CONV2 + REST), conv_seconds=seconds, **more)


def direct(*speeds: float, model: str = "50:500", bandwidth: float | None = None, **more: Any) -> Direct:
    network = build_model(model, None, IMAGE, 10, True)
    named = convolutions(network, IMAGE, BATCH, "float32")
    workers = tuple(worker(f"w{i}", speed, bandwidth=bandwidth) for i, speed in enumerate(speeds))
    specs, names = tuple(spec for _, spec in named), tuple(name for name, _ in named)
    return Direct(specs, names, workers, model=network, shape=IMAGE, **more)


HALVES = {"conv1": {"w0": 25, "w1": 25}, "conv2": {"w0": 250, "w1": 250}}
EDGES = 4 * 4 * ((25 * 3 + 1) + (25 * 50 + 1 + 8 * 8 * 10))
"""Bytes of what each of the two is sent of four channels of either layer: kernels, biases, weights of the dense one."""


def test_one_worker_s_step_is_its_own_whole_step() -> None:
    step = direct(1.0).step()
    assert step.seconds == pytest.approx(BATCH * (CONV1 + CONV2 + REST))
    assert (step.comm, step.up, step.down) == (0.0, (0,), (0,))
    assert direct(1.0).speedup() == pytest.approx(1.0)


def test_shares_by_speeds_alone_are_eq_1_on_any_link() -> None:
    slow = direct(3.0, 1.0, bandwidth=1e3)
    assert slow.step().kernels == ((50, 0), (500, 0))
    assert replace(slow, kernel_shares="speeds").step().kernels == ((38, 12), (375, 125))


def test_on_free_links_two_workers_halve_what_is_sharded_but_for_channels_computed_twice() -> None:
    """Four of 50 and of 500 channels are held besides each half: a pass more of two in conv1, of three in conv2."""
    step = direct(1.0, 1.0).step()
    conv1, conv2 = CONV1 * (25 + 4 / 2) / 50, CONV2 * (250 + 4 / 3) / 500
    assert step.kernels == ((25, 25), (250, 250))
    assert step.comm == 0.0
    assert step.comp == pytest.approx(BATCH * REST)
    assert step.conv == pytest.approx(BATCH * (conv1 + conv2))
    assert step.busy == pytest.approx([BATCH * (conv1 + conv2 + REST), BATCH * (conv1 + conv2)])


def test_bytes_and_seconds_of_a_step_of_two_by_hand() -> None:
    """Pooled maps of 16x16 to each other and back, two channels more of each gradient; ten sums to each other."""
    bandwidth = 5e6
    found = direct(1.0, 1.0, bandwidth=bandwidth, given=HALVES)
    step, scale = found.step(), 4 * BATCH
    pixels, sums = 16 * 16 * scale, 10 * scale
    assert step.up == step.down == (25 * pixels + 27 * pixels + sums + EDGES,) * 2
    assert step.comm == pytest.approx((25 * pixels + 27 * pixels + sums + EDGES) / bandwidth)


def test_what_travels_is_what_the_cluster_s_own_count_says() -> None:
    found = direct(
        1.0, 2.0, 0.5, model="150:800", given={"conv1": {"w0": 70, "w1": 80}, "conv2": {"w1": 500, "w2": 300}}
    )
    moved, edges = traffic(found.plan), weight_traffic(found.plan)
    assert found.home == 1
    for w, name in enumerate(("w0", "w1", "w2")):
        assert found.step().up[w] == 4 * BATCH * moved[name].up + 4 * edges[name].up
        assert found.step().down[w] == 4 * BATCH * moved[name].down + 4 * edges[name].down


def test_first_samples_leave_no_channel_to_compute_twice_and_exchange_gradients() -> None:
    """Of 50 kernels of 75 weights and a bias; of the second layer's kernels the four at the edge."""
    found = direct(1.0, 1.0, bandwidth=5e6, given=HALVES, first_conv="samples")
    step, pixels = found.step(), 16 * 16 * 4 * BATCH
    assert step.taken[0] == pytest.approx([BATCH * CONV1 / 2] * 2)
    apart = 4 * 50 * 76 + 4 * 4 * (25 * 50 + 1 + 8 * 8 * 10)
    assert step.up == step.down == (25 * pixels + 25 * pixels + 10 * 4 * BATCH + apart,) * 2


def test_measured_seconds_of_half_a_layer_count_for_more_than_channels() -> None:
    """A fifth of conv1 is there for every shard: two take 0.6 of it each, by samples half."""
    found = direct(1.0, 1.0, given=HALVES)
    workers = tuple(w.model_copy(update={"conv_fixed": {"conv1": 0.2 * CONV1}}) for w in found.workers)
    assert replace(found, workers=workers).step().taken[0] == pytest.approx([0.6 * BATCH * CONV1] * 2)
    chosen = replace(found, workers=workers, given=None)
    assert [stage.by for stage in chosen.plan.stages] == ["samples", "kernels"]
    assert chosen.step().taken[0] == pytest.approx([0.5 * BATCH * CONV1] * 2)


def test_half_as_many_bytes_a_number_halve_all_but_the_kernels() -> None:
    whole, half = (direct(1.0, 1.0, given=HALVES, itemsize=size).step() for size in (4, 2))
    assert [2 * (n - EDGES) for n in half.up] == [n - EDGES for n in whole.up]


@settings(max_examples=30)
@given(st.floats(1e5, 1e10), st.integers(2, 64), st.floats(0.3, 3))
def test_parts_hide_what_there_is_to_hide_and_no_more(bandwidth: float, parts: int, speed: float) -> None:
    one = direct(1.0, speed, bandwidth=bandwidth, given=HALVES)
    whole, cut = one.step(), replace(one, sub_batches=parts).step()
    compute = whole.conv + whole.comp
    through = sum(max(map(max, flow.moved.values())) for flow in one.plan.flows if flow.moved)
    edges = whole.seconds - compute - 4 * BATCH * through / bandwidth
    line = max(*whole.up, *whole.down) / bandwidth
    assert (cut.conv, cut.comp, cut.up) == (whole.conv, whole.comp, whole.up)
    assert cut.seconds <= whole.seconds * (1 + 1e-12)
    assert cut.seconds >= max(compute, line - edges) * (1 - 1e-12)
    steps = [replace(one, sub_batches=n).step().seconds for n in (1, 2, 4, 8)]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(steps))


def test_a_minibatch_has_no_more_parts_than_samples() -> None:
    assert replace(direct(1.0, 1.0), sub_batches=1000).parts == BATCH


def test_a_worker_behind_a_link_that_is_too_slow_gets_no_kernels() -> None:
    step = direct(1.0, 1.0, bandwidth=1e4).step()
    assert step.kernels == ((50, 0), (500, 0))
    assert step.seconds == pytest.approx(BATCH * (CONV1 + CONV2 + REST))


def test_by_eq_1_it_gets_its_share_all_the_same() -> None:
    found = direct(1.0, 3.0, bandwidth=1e4).by_speed()
    assert found.step().kernels == ((13, 37), (125, 375))
    assert found.speedup() < 0.01


def test_shards_too_small_to_normalise_leave_that_to_home() -> None:
    """Of 50 channels 16 workers would compute too many twice: home pools conv1's map, which travels whole."""
    spread, merged = direct(1.0, 1.0, given=HALVES), direct(*[1.0] * 16, first_conv="kernels").by_speed()
    home, shares = merged.workers[0], merged.step().kernels[0]
    assert [stage.rest is not None for stage in merged.plan.stages] == [True, True]
    assert [stage.rest is not None for stage in spread.plan.stages] == [False, True]
    assert merged.step().comp == pytest.approx(BATCH * (REST + home.spread_share * CONV1))
    assert merged.step().taken[0][0] == pytest.approx(BATCH * (1 - home.spread_share) * CONV1 * shares[0] / 50)
    assert next(merged.plan.flows).moved["w0"].down == 32 * 32 * sum(shares[1:])
    assert next(spread.plan.flows).moved["w0"].down == 16 * 16 * 25


def test_latencies_and_overheads_come_on_top() -> None:
    plain = direct(1.0, 1.0, given=HALVES)
    slow = replace(plain, workers=tuple(w.model_copy(update={"latency": 0.1}) for w in plain.workers))
    later = replace(slow, overhead=0.5, per_task=0.01)
    assert slow.step().seconds - plain.step().seconds == pytest.approx(4 * 0.1)
    assert later.step().seconds - slow.step().seconds == pytest.approx(0.5 + 0.01 * later.plan.task_count)


def test_a_log_s_breakdown_is_the_step_s() -> None:
    found = direct(1.0, 3.0, bandwidth=1e8)
    about = {"parameters": 1000, "validation_samples": 10}
    step = found.step()
    logged = tables(sharded_events(found, 640, 3, about)).papers_step
    assert isinstance(logged, StepParts)
    assert (logged.comm, logged.conv, logged.comp) == pytest.approx((step.comm, step.conv, step.comp))


# --- what stays at home ---


def test_what_was_measured_at_home_is_what_stays_there_and_a_step_s_noise_does_not() -> None:
    """A whole step of a second, of which its parts explain 0.81: with two workers they take 0.405 and the rest."""
    seconds = {"conv1": 0.2 / BATCH, "conv2": 0.6 / BATCH}
    own: dict[str, Any] = {"images_per_second": BATCH, "conv_seconds": seconds, "conv_fixed": {"conv1": 0.0}}
    found = direct(1.0, 1.0, given=HALVES)
    workers = tuple(Worker(name=f"w{i}", rest_seconds=0.01 / BATCH, **own) for i in range(2))
    measured = replace(found, workers=workers)
    assert measured.step().comp == pytest.approx(0.01)
    assert measured.serial == pytest.approx(0.01 / 0.81)
    assert measured.speedup() == pytest.approx(0.81 / 0.41)
    alone = replace(measured, workers=workers[:1], given=None)
    assert alone.speedup() == pytest.approx(1.0)


def test_without_that_all_a_step_takes_besides_its_convolutions_is_serial() -> None:
    """Logs and cluster files from before it was measured."""
    found = direct(1.0, 1.0)
    assert found.workers[0].rest_seconds is None
    assert found.step().comp == pytest.approx(BATCH * REST)
    assert found.serial == pytest.approx(REST / (CONV1 + CONV2 + REST))
