"""Real arithmetic in simulated time, against loops that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.events import EpochEnded, Event, RoundEnded, WorkerLost
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.nn import OptimizerState, StepPace
from daskcnn.nn.optimizers import OWN, CenterDescent
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES, Local, Snapshot, UpdateRule
from daskcnn.ps.average import AVERAGE
from daskcnn.sim.cluster import parse_cluster
from daskcnn.sim.learners import LAYERS, Learner, Learnt, Training, clusters_of_points, turned_to
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import BatchPlan, batches
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica
from tests.sim.sim_cases import WITHIN, cluster, of, run, workload

SAMPLES, JUDGED = 400, 100
every = pytest.mark.parametrize("name", RULES)
dataset = clusters_of_points(SAMPLES + JUDGED)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As on a worker. Threads that other tests have left might change the number in mid-run, and with it rounding."""
    with single_threaded_blas():
        yield


def job_of(strategy: str, **train: Any) -> Job:
    usual = {"strategy": strategy, "epochs": 3, "batch_size": 32, "lr": 0.02, **train}
    rule = WITHIN.get(strategy, {})
    return resolve({"data": {"validation": JUDGED}, "model": {"layers": LAYERS}, "train": usual, "rule": rule})


def replica_of(job: Job) -> Replica:
    return Replica(job, dataset, Device.of("cpu"), clock=lambda: 0.0)


def trained(job: Job, *speeds: float, **worker: Any) -> tuple[Simulation, list[Event]]:
    work = Workload.of_job(job, samples=SAMPLES, numbers=replica_of(job).layout.size)
    return run(work, cluster(*speeds, **worker), learner=lambda: Training(replica_of(job), work.rule))


@pytest.mark.parametrize("name", ["sgwu", "agwu", "bsp", "downpour"])
def test_one_worker_trains_as_a_loop_does(name: str) -> None:
    """Bit for bit where it gets its own weights back; where what it gained is pushed, that is rounded on its way."""
    rule = {"agwu": {"accuracy_floor": 1.0}, "downpour": {"n_push": 3, "n_fetch": 3}}.get(name, {})
    train = {"strategy": name, "partition": "udpa", "epochs": 3, "batch_size": 32, "lr": 0.02}
    job = resolve({"data": {"validation": JUDGED}, "model": {"layers": LAYERS}, "train": train, "rule": rule})
    replica = replica_of(job)
    for epoch in range(3):
        progress = (epoch / 3, (epoch + 1) / 3)
        replica.train(((0, SAMPLES),), SAMPLES, presentation=epoch, progress=progress)
    center = trained(job, 100.0)[0].server.snapshot().center
    if name in ("sgwu", "bsp"):
        assert center.tobytes() == replica.host_weights().tobytes()
    else:
        np.testing.assert_allclose(center, replica.host_weights(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bsp", "local-sgd", "sgwu"])
def test_in_int8_the_others_go_on_where_a_worker_is_lost(name: str) -> None:
    """What its pushes have lost is lost with it. The center goes on as the one of a run in float32."""

    def center(wire: str) -> np.ndarray:
        job = job_of(name)
        job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"wire": wire})})
        work = Workload.of_job(job, samples=SAMPLES, numbers=replica_of(job).layout.size)
        workers = [{"name": f"w{i}", "images_per_second": 100.0, **({"dies": 3.0} if i == 2 else {})} for i in range(3)]
        on = parse_cluster({"worker": workers})
        simulation, events = run(work, on, learner=lambda: Training(replica_of(job), work.rule))
        assert [event.worker for event in of(WorkerLost, events)] == ["w2"]
        assert simulation.rounds.done == 3 * SAMPLES
        return np.asarray(simulation.server.snapshot().center)

    plain, coded = center("float32"), center("int8")
    gain = np.abs(plain - replica_of(job_of(name)).host_weights()).max()
    assert 0 < np.abs(coded - plain).max() < 0.1 * gain


@every
def test_replicas_learn_by_every_rule(name: str) -> None:
    _, events = trained(job_of(name, epochs=12), 100.0, 150.0, 300.0, latency=0.01)
    accuracies = [event.validation.accuracy for event in of(EpochEnded, events)]
    assert accuracies[-1] > 0.15  # of ten classes
    assert accuracies[-1] > accuracies[0] or len(accuracies) == 1
    assert all(event.validation.auc is not None for event in of(EpochEnded, events))
    assert 0.5 < of(EpochEnded, events)[-1].validation.auc <= 1
    rounds = of(RoundEnded, events)
    assert all(event.loss > 0 and 0 <= event.accuracy <= 1 and event.lr > 0 for event in rounds)


@pytest.mark.parametrize("name", ["sgwu", "bsp", "parallel-sgd"])
def test_the_average_of_the_center_is_judged(name: str) -> None:
    """The workers that meet train as ever."""
    plain, _ = trained(job_of(name), 100.0, 150.0)
    job = job_of(name, ema=0.8)
    simulation, events = trained(job, 100.0, 150.0)
    snapshot = simulation.server.snapshot()
    np.testing.assert_array_equal(snapshot.center, plain.server.snapshot().center)
    average = (snapshot.state or {})[AVERAGE]
    found = replica_of(job).evaluate(dataset.train, SAMPLES, SAMPLES + JUDGED, weights=average)
    assert of(EpochEnded, events)[-1].validation.loss == pytest.approx(found.loss, rel=1e-5)


def test_unequal_workers_find_the_noise_of_a_network_s_single_gradients() -> None:
    """At a learning rate so low that the network stays as it is. The samples stand for all that there could be."""
    train = {"strategy": "bsp", "epochs": 20, "batch_size": 32, "lr": 1e-9}
    job = resolve({"data": {"validation": JUDGED}, "model": {"layers": LAYERS}, "train": train})
    replica, single = replica_of(job), []
    with batches(dataset, dataset.train, BatchPlan(((0, SAMPLES),), 1, seed=0), "float32") as ready:
        for batch in ready:
            replica.step(batch, StepPace(0.0), descends=False)
            single.append(replica.gradients[: replica.layout.parameter_size].astype(float))
    mean, trace = np.mean(single, axis=0), np.var(single, axis=0, ddof=1).sum()
    expected = trace / (mean @ mean - trace / SAMPLES)
    _, events = trained(job, 100.0, 300.0)
    assert {event.samples > SAMPLES / 2 for event in of(RoundEnded, events)} == {True, False}  # of unequal parts
    last = of(EpochEnded, events)[-1]
    assert last.noise_error < 0.2 * expected
    assert abs(last.noise_scale - expected) < 2 * last.noise_error


@every
def test_time_does_not_depend_on_whether_anything_is_learnt(name: str) -> None:
    job = job_of(name)
    work = Workload.of_job(job, samples=SAMPLES, numbers=replica_of(job).layout.size)
    on = cluster(100, 150, 300, latency=0.01, server={"bandwidth": 1e6, "merge_rate": 1e6})
    learnt = run(work, on, learner=lambda: Training(replica_of(job), work.rule))[1]
    only_timed = run(work, on)[1]
    timing = ("kind", "at", "worker", "round", "samples", "busy", "wait", "communication", "evaluation", "pushes")
    moved = ("bytes_up", "bytes_down", "staleness", "version", "base_version", "step", "epoch")
    for a, b in zip(learnt, only_timed, strict=True):
        assert [getattr(a, key, None) for key in (*timing, *moved)] == [
            getattr(b, key, None) for key in (*timing, *moved)
        ]


@every
def test_real_arithmetic_is_the_same_every_time(name: str) -> None:
    job = job_of(name)
    centers = {trained(job, 100, 170, latency=0.01)[0].server.snapshot().center.tobytes() for _ in range(2)}
    assert len(centers) == 1


@pytest.mark.parametrize("partition", ["idpa", "idpa-paper", "udpa"])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.barrier])
def test_a_reproducible_run_has_the_same_numbers_whatever_the_speeds(name: str, partition: str) -> None:
    """Weights to the bit, and each evaluation."""
    job = job_of(name, partition=partition, reproducible=True)
    runs = [trained(job, *speeds, latency=0.01) for speeds in ((100, 170, 90), (300, 80, 80))]
    assert len({simulation.server.snapshot().center.tobytes() for simulation, _ in runs}) == 1
    first, second = ([event.validation for event in of(EpochEnded, events)] for _, events in runs)
    assert first == second


@pytest.mark.parametrize("partition", ["idpa", "udpa"])
@pytest.mark.parametrize("name", ["sgwu", "agwu"])
def test_pushes_as_far_apart_as_a_round_is_long_are_the_papers(name: str, partition: str) -> None:
    """To the last bit, in the same simulated seconds."""
    job = job_of(name, partition=partition)
    (paper, events), (apart, others) = (
        trained(job.model_copy(update={"rule": RULES[name].model_validate(rule)}), 100, 290, latency=0.01)
        for rule in ({}, {"every": 1000})
    )
    assert paper.server.snapshot().center.tobytes() == apart.server.snapshot().center.tobytes()
    assert of(RoundEnded, events) == of(RoundEnded, others)


@pytest.mark.parametrize("name", ["sgwu", "agwu"])
def test_replicas_of_the_papers_rules_may_push_within_rounds(name: str) -> None:
    """Behind a barrier all meet the same number of times, each after as many steps as its speed allows."""
    rule = RULES[name].model_validate({"every": 2})
    job = job_of(name, epochs=12, partition="idpa", increments=1).model_copy(update={"rule": rule})
    _, events = trained(job, 100.0, 300.0, latency=0.01)
    slow, fast = ([e for e in of(RoundEnded, events) if e.worker == w] for w in ("w0", "w1"))
    assert (slow[0].samples, fast[0].samples) == (100, 300)
    assert (slow[0].pushes, fast[0].pushes) == ((5, 5) if name == "sgwu" else (2, 5))
    assert of(EpochEnded, events)[-1].validation.accuracy > 0.2  # of ten classes


def test_the_optimizer_s_state_goes_along_where_a_run_changes_its_strategy() -> None:
    """From the server, which makes the steps of `bsp`, to each replica of `local-sgd`, and back."""
    job = job_of("auto", momentum=0.9, ema=0.9)
    snapshot = trained(job, 100.0, 150.0)[0].server.snapshot()
    learners = {name: Training(replica_of(job), RULES["bsp"]()) for name in ("w0", "w1")}
    one = learners["w0"]
    steps: Any = one.steps
    server = steps.state_of(snapshot.state, one.weights.dtype)
    assert server.vectors.any()
    kept = turned_to(RULES["local-sgd"](), learners, snapshot)
    assert kept is not None
    assert AVERAGE in kept
    for each in learners.values():
        own = each.replica.host_optimizer()
        assert (own.vectors.tobytes(), own.count) == (server.vectors.tobytes(), server.count)
    local = Local(one.weights, one.weights)
    one.begin(Round("w0", 0, ((0, 64),), 64, (0.0, 0.1)), local, 1.0)
    one.train(1)
    moved = one.replica.host_optimizer()
    assert moved.vectors.tobytes() != server.vectors.tobytes()
    back = turned_to(RULES["bsp"](), learners, replace(snapshot, state=kept))
    assert back is not None
    assert steps.state_of(back, one.weights.dtype).vectors.tobytes() == moved.vectors.tobytes()


@pytest.mark.parametrize(("leaves", "arrives"), [(None, 10.0), (10.0, 9.0)], ids=["stays", "another is alone then"])
def test_the_optimizer_s_state_goes_along_where_a_worker_is_alone_for_a_while(
    leaves: float | None, arrives: float
) -> None:
    """Each step is of all samples: two workers, one of them, and that with another make the steps of one machine."""
    train = {"strategy": "bsp", "partition": "udpa", "optimizer": "adamw", "epochs": 8, "batch_size": SAMPLES}
    model = {"layers": LAYERS, "dtype": "float64"}
    job = resolve({"data": {"validation": JUDGED}, "model": model, "train": train})
    work = Workload.of_job(job, samples=SAMPLES, numbers=replica_of(job).layout.size)
    workers: list[dict[str, Any]] = [{"name": f"w{i}", "images_per_second": 100.0} for i in range(3)]
    events: list[Event] = []

    def trained_on(*members: dict[str, Any]) -> Snapshot:
        on, learner = parse_cluster({"worker": [*members]}), lambda: Training(replica_of(job), work.rule)
        return Simulation(work, on, learner=learner, emit=events.append).run()

    found = trained_on(workers[0] | {"leaves": leaves}, workers[1] | {"leaves": 3.0}, workers[2] | {"arrives": arrives})
    rounds = of(RoundEnded, events)
    numbers = [sum(event.round == number for event in rounds) for number in range(8)]
    assert (numbers[0], numbers[-1], min(numbers)) == (2, 2 if leaves is None else 1, 1)
    assert rounds[-1].worker == "w2"
    alone = trained_on(workers[0])
    np.testing.assert_allclose(found.center, alone.center, rtol=1e-3, atol=1e-5)
    assert found.state is not None
    assert alone.state is not None
    assert alone.state[f"{OWN}steps"] == 8
    for name in [name for name in alone.state if name.startswith(OWN)]:
        np.testing.assert_allclose(found.state[name], alone.state[name], rtol=1e-3, atol=1e-6)


def test_a_worker_that_trains_by_itself_sends_its_weights_as_they_are() -> None:
    """In int8 only what goes over a link is coded."""
    job = job_of("auto")
    coded = job.model_copy(update={"cluster": job.cluster.model_copy(update={"wire": "int8"})})
    plain, other = (trained(each, 100.0)[0].server.snapshot().center for each in (job, coded))
    assert plain.tobytes() == other.tobytes()


def test_early_stopping_ends_a_simulation_as_it_ends_a_run() -> None:
    events = trained(job_of("sgwu", epochs=40, early_stopping=2), 100, 100)[1]
    best, accuracies = 0.0, [event.validation.accuracy for event in of(EpochEnded, events)]
    worse = [best := max(best, accuracy) for accuracy in accuracies]
    assert of(EpochEnded, events)[-1].epoch < 40
    assert worse[-3] == worse[-1]


def test_half_precision_on_the_wire_changes_the_numbers_a_little() -> None:
    job = job_of("sgwu")
    half = job.model_copy(update={"cluster": job.cluster.model_copy(update={"wire": "float16"})})
    exact, rounded = (trained(each, 100, 200)[0].server.snapshot().center for each in (job, half))
    assert 0 < np.abs(exact - rounded).max() < 0.05


@pytest.mark.parametrize("name", ["sgwu", "agwu", "bsp", "local-sgd", "downpour", "admm"])
def test_int8_on_the_wire_changes_the_numbers_a_little_in_a_quarter_of_the_bytes(name: str) -> None:
    job = job_of(name)
    coded = job.model_copy(update={"cluster": job.cluster.model_copy(update={"wire": "int8"})})
    (exact, events), (rounded, others) = (trained(each, 100, 200) for each in (job, coded))
    assert 0 < np.abs(exact.server.snapshot().center - rounded.server.snapshot().center).max() < 0.05
    up, least = (sum(event.bytes_up for event in of(RoundEnded, each)) for each in (events, others))
    down, fewer = (sum(event.bytes_down for event in of(RoundEnded, each)) for each in (events, others))
    assert least < 0.3 * up  # the last block of this small network is filled up
    assert fewer < (0.3 if RULES[name].barrier else 0.51) * down


# --- a parabola, whose course is known ---


class Parabola:
    """Half the squared distance to a minimum; a step goes a tenth of the way there."""

    _rule: UpdateRule

    def __init__(self, minimum: np.ndarray) -> None:
        self.weights, self._minimum, self._adjust = np.zeros(2), minimum, lambda grads: grads
        self._taken = 0
        self.frozen: tuple[slice, ...] = ()
        self.steps: CenterDescent | None = None
        self.besides: tuple[slice, ...] = ()
        self.optimizer: OptimizerState | None = None

    def use(self, rule: UpdateRule) -> None:
        self._rule = rule

    def begin(self, round_: Any, local: Any, scale: float, sizes: Any = None, optimizer: Any = None) -> None:
        self._taken, self._local = 0, local

    def train(self, steps: int) -> Learnt:
        for _ in range(steps - self._taken):
            grads = self._rule.local_step(self.weights - self._minimum, self._local)
            self.weights -= 0.1 * grads
        self._taken = steps
        return Learnt()

    def judge(self, part: JudgedPart, weights: Any = None) -> None:
        return None


def parabolas(rule: UpdateRule, *minima: tuple[float, float]) -> Callable[[], Learner]:
    """A worker for each minimum, in turn."""
    left = [np.array(minimum) for minimum in minima]

    def made() -> Learner:
        parabola = Parabola(left.pop(0))
        parabola._rule = rule
        return parabola

    return made


@every
def test_replicas_with_one_minimum_meet_in_it(name: str) -> None:
    work = workload(name, rule=WITHIN.get(name), epochs=40)
    learner = parabolas(work.rule, (3.0, -2.0), (3.0, -2.0), (3.0, -2.0))
    simulation, _ = run(work, cluster(10, 20, 30, latency=0.01), learner=learner)
    np.testing.assert_allclose(simulation.server.snapshot().center, [3.0, -2.0], atol=1e-3)


@pytest.mark.parametrize("name", ["bsp", "admm"])
def test_replicas_with_minima_of_their_own_meet_in_the_middle(name: str) -> None:
    rule = {"bsp": {"every": 1}, "admm": {"every": 1, "rho": 1.0}}[name]
    work = workload(name, rule=rule, epochs=60)
    learner = parabolas(work.rule, (1.0, 0.0), (0.0, 3.0))
    simulation, _ = run(work, cluster(10, 10), learner=learner)
    np.testing.assert_allclose(simulation.server.snapshot().center, [0.5, 1.5], atol=1e-3)
