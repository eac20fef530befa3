"""Laws of steps that grow with the gradient noise scale, and runs in which they do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.events import EpochEnded, Event, SamplesAllocated, StepResized
from daskcnn.job.network import replica_bytes
from daskcnn.job.prepared import largest_step
from daskcnn.job.tables import Job
from daskcnn.nn import StepPace
from daskcnn.ps import NoiseScale
from daskcnn.ps.gradient_noise import WITHIN_ERROR, GradientNoise
from daskcnn.sim.learners import LAYERS, Training
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import Batch, BatchPlan, batches
from daskcnn.training.coordinator import facts, growth, orders
from daskcnn.training.coordinator.growth import StepSeconds, better_step
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.replica import Replica
from tests.sim.sim_cases import cluster, of, run
from tests.sim.test_learners import JUDGED, SAMPLES, dataset, replica_of
from tests.training.coordinator_shell import Shell, report_of
from tests.training.test_coordinator_machine import settings_of

seconds = st.floats(1e-6, 10)
scales = st.floats(1, 1e6)
firsts, doublings = st.integers(1, 200), st.integers(0, 6)
few = settings(max_examples=60)


# --- the decision ---


@few
@given(firsts, doublings, scales, scales, st.floats(0, 1e3), seconds, seconds)
def test_a_larger_noise_scale_never_makes_smaller_steps(
    first: int, doubled: int, one: float, other: float, error: float, fixed: float, growing: float
) -> None:
    found = [
        better_step(first << doubled, first, 1 << 30, NoiseScale(scale, error), StepSeconds(fixed, growing))
        for scale in sorted((one, other))
    ]
    assert found[0] <= found[1]


@few
@given(firsts, doublings, st.integers(1, 10_000), scales, st.floats(0, 1e3), seconds, seconds)
def test_steps_stay_within_memory_and_noise_and_never_shrink_below_the_first(
    first: int, doubled: int, most: int, scale: float, error: float, fixed: float, growing: float
) -> None:
    now = first << doubled
    found = better_step(now, first, most, NoiseScale(scale, error), StepSeconds(fixed, growing))
    assert first <= found <= max(first, most)
    assert found <= max(first, scale + error)
    assert found <= max(now, scale)
    assert math.log2(found / first).is_integer()


@few
@given(firsts, doublings, scales, st.floats(0, 1e3), seconds, seconds)
def test_nothing_changes_where_nothing_has_changed(
    first: int, doubled: int, scale: float, error: float, fixed: float, growing: float
) -> None:
    now = first << doubled
    found = better_step(now, first, 1 << 30, NoiseScale(scale, error), StepSeconds(fixed, growing))
    again = StepSeconds(fixed, growing * found / now)
    assert better_step(found, first, 1 << 30, NoiseScale(scale, error), again) == found


@few
@given(firsts, doublings, scales)
def test_where_a_step_has_no_fixed_time_it_does_not_grow(first: int, doubled: int, scale: float) -> None:
    noise, now = NoiseScale(scale, 0.0), first << doubled
    assert better_step(now, first, 1 << 30, noise, StepSeconds(0.0, 1.0)) <= now
    assert better_step(first, first, 1 << 30, noise, StepSeconds(0.0, 1.0)) == first


@pytest.mark.parametrize("noise", [None, WITHIN_ERROR])
def test_without_a_known_noise_scale_steps_stay_as_they_are_unless_memory_shrinks(noise: NoiseScale | None) -> None:
    assert better_step(256, 64, 1 << 30, noise, StepSeconds(1.0, 1.0)) == 256
    assert better_step(256, 64, 200, noise, StepSeconds(1.0, 1.0)) == 128


def test_a_better_step_has_to_save_enough() -> None:
    """By hand: with B = 300 and F = 1.8 · (c·64), 128 samples take 0.797 of the seconds to the same progress.

    That is (1 + 300/128) · 3.8 / ((1 + 300/64) · 2.8).
    """
    noise, of_step = NoiseScale(300.0, 1.0), StepSeconds(1.8, 1.0)
    assert better_step(64, 64, 128, noise, of_step) == 128
    assert better_step(64, 64, 128, noise, of_step, worth=0.21) == 64


# --- runs ---


def growing(**train: Any) -> Job:
    given = {"strategy": "bsp", "epochs": 6, "batch_size": 16, "lr": 0.01, "largest_batch": 256, **train}
    return Job.model_validate({"data": {"validation": JUDGED}, "model": {"layers": LAYERS, "dtype": "float64"}} | {
        "train": {"partition": "idpa", "increments": 1, "loss": "softmax", **given}
    })  # fmt: skip


def simulated(job: Job, *speeds: float, **how: Any) -> tuple[Simulation, list[Event]]:
    work = Workload.of_job(job, samples=SAMPLES, numbers=replica_of(job).layout.size)
    return run(work, cluster(*speeds, **how), learner=lambda: Training(replica_of(job), work.rule))


def test_steps_grow_where_meetings_are_slow_and_the_log_says_so() -> None:
    _, events = simulated(growing(), 3000.0, 1000.0, bandwidth=1e6, latency=0.002)
    resized, epochs = of(StepResized, events), of(EpochEnded, events)
    assert resized
    assert resized[0].before == 16 < resized[0].samples <= resized[0].noise_scale
    assert epochs[0].step_samples == 16
    assert epochs[-1].step_samples == resized[-1].samples
    assert resized[-1].rate == pytest.approx(resized[-1].samples / 16)
    ends = [event.step for event in epochs]
    last = -(-SAMPLES // epochs[-1].step_samples)
    assert ends[-1] - ends[-2] == last
    given = [sum(event.step.values()) for event in of(SamplesAllocated, events)]
    assert given[0] == 16
    assert given[-1] == resized[-1].samples


def test_steps_stay_where_meetings_take_no_time() -> None:
    assert not of(StepResized, simulated(growing(), 3000.0, 1000.0)[1])


def test_a_worker_alone_measures_the_noise_by_halves_and_steps_grow() -> None:
    _, events = simulated(growing(epochs=40, lr=0.001), 3000.0, step_fixed=0.002)
    epochs = of(EpochEnded, events)
    assert epochs[-1].step_samples > 16
    assert any(event.noise_scale for event in epochs)


def test_the_largest_step_is_what_memory_has_room_for() -> None:
    """By hand: a sample's maps in front of the three layers, three times each, in numbers of eight bytes."""
    job, each = growing(), 3 * 8 * (16 + 24 + 24)
    beside = replica_bytes(job, dataset)
    assert largest_step(job, dataset, beside + 1000 * each) == 1000
    assert largest_step(job, dataset, beside) == 16


def test_adamw_grows_its_rate_by_the_root() -> None:
    _, events = simulated(growing(optimizer="adamw", lr=0.001), 3000.0, 1000.0, bandwidth=1e6, latency=0.002)
    resized = of(StepResized, events)[-1]
    assert resized.rate == pytest.approx(math.sqrt(resized.samples / 16))


@pytest.mark.parametrize("speeds", [(1000.0,), (3000.0, 1000.0), (900.0, 500.0, 200.0)])
def test_any_split_makes_the_steps_of_one_process(speeds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rounds, steps, samples and rates, where each round's steps are twice those of the one before."""
    monkeypatch.setattr(growth, "better_step", lambda now, *rest: min(now * 2, 128))
    rates: list[float] = []
    monkeypatch.setattr(Replica, "pace_at", noted(rates, Replica.pace_at))
    simulation, events = simulated(growing(epochs=4), *speeds)
    epochs = of(EpochEnded, events)
    assert [event.step_samples for event in epochs] == [16, 32, 64, 128]
    steps = [-(-SAMPLES // event.step_samples) for event in epochs]
    assert len(rates) == sum(steps) * len(speeds)
    expected = [
        0.01 * 2**k * (1 - (k + samples / SAMPLES) / 4)
        for k, n in enumerate(steps)
        for samples in (SAMPLES * i // n for i in range(n))
    ]
    own = sorted(rates)[:: len(speeds)]
    np.testing.assert_allclose(own, sorted(expected), rtol=0.02)
    if len(speeds) == 1:
        assert simulation.server.snapshot().version == 4


def noted(rates: list[float], of_replica: Any) -> Any:
    def pace_at(self: Replica, progress: float, scale: float = 1.0) -> StepPace:
        pace: StepPace = of_replica(self, progress, scale)
        rates.append(pace.lr)
        return pace

    return pace_at


# --- the coordinator ---


def shell(kept: Any = None, **more: Any) -> Shell:
    return Shell(settings_of(("bsp", {}), "udpa", largest_step=64, **{"batch_size": 8, "epochs": 4, **more}), kept)


def one_round(of: Shell, noise: float) -> None:
    """All replicas report their rounds, of steps that are nearly all exchange."""
    rounds = begun(of)
    of.pending = [each for each in of.pending if not isinstance(each[0], orders.StartRound)]
    for order in rounds:
        of.version += 1
        found = report_of(order.round, version=of.version, busy=1e-3)
        found = found._replace(communication=1.0, noise=NoiseScale(noise, 1.0))
        of.tell(facts.RoundDone(order.round.worker, order.life, order.session, found, of.now))


def begun(of: Shell) -> list[orders.StartRound]:
    return [order for order, _ in of.pending if isinstance(order, orders.StartRound)]


def until_rounds(of: Shell) -> None:
    while not begun(of):
        of.answer(0)


def test_a_resumed_run_goes_on_with_the_steps_and_the_rate_that_it_had() -> None:
    first = shell()
    first.start("cpu-0", "cpu-1")
    until_rounds(first)
    one_round(first, 40.0)
    going_on = begun(first)
    assert {order.scale for order in going_on} == {4.0}
    saved = first.of(orders.Save)[-1]
    again = shell(Kept(1, saved.epoch, saved.book, judged=True))
    again.start("cpu-0", "cpu-1")
    until_rounds(again)
    assert [(o.round.steps, o.round.samples, o.scale) for o in begun(again)] == [
        (o.round.steps, o.round.samples, o.scale) for o in going_on
    ]


def test_steps_fit_the_memory_of_the_workers_that_begin_a_life() -> None:
    first = shell()
    first.start("cpu-0", "cpu-1")
    until_rounds(first)
    one_round(first, 40.0)
    saved = first.of(orders.Save)[-1]
    assert saved.book["growth"]["samples"] == 32
    again = shell(Kept(1, saved.epoch, saved.book, judged=True))
    again.tell(facts.WorkerReady("cpu-0", "cpu", 0.0))
    _, answer = again.pending.pop(0)
    measured: Any = answer(1.0)
    again.tell(replace(measured, row=measured.row.model_copy(update={"largest_step": 16})))
    until_rounds(again)
    assert {order.scale for order in begun(again)} == {2.0}


def test_no_step_is_larger_than_the_data_set() -> None:
    job = growing(largest_batch=1 << 20)
    assert Settings.of(job, 1000).largest_step == 1000


# --- noise by halves ---


def first_batch(job: Job) -> Batch:
    plan = BatchPlan(((0, SAMPLES),), job.train.batch_size, seed=0)
    with batches(dataset, dataset.train, plan, job.model.dtype) as ready:
        return next(iter(ready))


def test_a_step_by_halves_is_the_whole_step_and_tells_the_noise_as_two_workers_do() -> None:
    job = growing()
    whole, halved, other = replica_of(job), replica_of(job), replica_of(job)
    batch, noise = first_batch(job), GradientNoise()
    assert halved.step(batch, StepPace(0.1), noise=noise) == pytest.approx(whole.step(batch, StepPace(0.1)))
    np.testing.assert_allclose(halved.host_weights(), whole.host_weights(), rtol=0, atol=1e-12)
    gradients = []
    for own in (slice(0, 8), slice(8, 16)):
        half = Batch(np.ascontiguousarray(batch.x[:, :, own]), batch.labels[own], batch.keys[own])
        other.step(half, StepPace(0.1), descends=False)
        gradients.append(other.gradients[: other.layout.parameter_size].copy())
    expected = GradientNoise()
    expected.met((8, 8), [float(np.vdot(g, g)) for g in (*gradients, (gradients[0] + gradients[1]) / 2)])
    np.testing.assert_allclose(noise.kept(), expected.kept(), rtol=1e-9)
