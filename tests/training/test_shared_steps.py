"""Law: where gradients are merged, a step split over replicas is the step of one machine, with every optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.arrays import Device
from daskcnn.job.network import center_descent_of
from daskcnn.job.resolve import resolve
from daskcnn.nn import StepPace
from daskcnn.ps import Join, Local, ParameterServer, Push, Reply, Snapshot
from daskcnn.ps.bsp import BSP
from daskcnn.ps.messages import COUNT
from daskcnn.ps.split import joined_snapshot, split_snapshot
from daskcnn.sim.learners import LAYERS, clusters_of_points
from daskcnn.store import Batch, BatchPlan, batches
from daskcnn.training.replica import Replica
from tests.ps.split_here import SplitServer

SAMPLES, STEPS = 24, 3
dataset = clusters_of_points(200)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "decay_all": False},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
    "lars": {"optimizer": "lars"},
    "lookahead": {"optimizer": "adamw", "lookahead": {"steps": 2, "alpha": 0.4, "last": 1.0}},
    "clip": {"optimizer": "sgd", "momentum": 0.9, "clip": 0.5},
    "rates": {"optimizer": "adamw", "rates": {"dense2": 0.1}},
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def replica_of(name: str, freeze: list[str] | None = None) -> Replica:
    train = {"strategy": "bsp", "epochs": 1, "batch_size": SAMPLES, "lr": 0.05, **OPTIMIZERS[name]}
    model = {"layers": LAYERS, "dtype": "float64", **({"freeze": freeze} if freeze else {})}
    job = resolve({"data": {"validation": 20}, "model": model, "train": train})
    return Replica(job, dataset, Device(), clock=lambda: 0.0)


def steps_of_job() -> list[Batch]:
    with batches(dataset, dataset.train, BatchPlan(((0, SAMPLES * STEPS),), SAMPLES, seed=3), "float64") as ready:
        return list(ready)


BATCHES = steps_of_job()


def part(batch: Batch, lo: int, hi: int) -> Batch:
    return replace(batch, x=batch.x[:, :, lo:hi], labels=batch.labels[lo:hi], keys=batch.keys[lo:hi])


def answer_of(server: ParameterServer, push: Push) -> np.ndarray:
    (reply,) = server.handle(push)
    assert isinstance(reply, Reply)
    return reply.weights


def paces() -> list[StepPace]:
    return [StepPace(0.05 / (i + 1), i / STEPS) for i in range(STEPS)]


def one_machine(replica: Replica) -> np.ndarray:
    for batch, pace in zip(BATCHES, paces(), strict=True):
        replica.step(batch, pace)
    return replica.host_weights()


def shared(rule: BSP, replica: Replica, server: Any, cuts: list[list[int]]) -> np.ndarray:
    """Make each step in parts, cut at these samples; each part has a worker, which begins from the server's center."""
    names = [f"w{i}" for i in range(len(cuts[0]) + 1)]
    for name in names:
        server.handle(Join(0, name, 1))
    for number, (batch, pace, cut) in enumerate(zip(BATCHES, paces(), cuts, strict=True), 1):
        answers: list[Any] = []
        for name, (lo, hi) in zip(names, zip([0, *cut], [*cut, SAMPLES], strict=True), strict=True):
            replica.step(part(batch, lo, hi), pace, descends=False)
            local = Local(replica.weights, replica.weights, gradients=replica.gradients, pace=(pace.lr, pace.progress))
            payload = rule.payload(local).copy()
            answers += server.handle(Push(0, name, 1, number, number - 1, payload, hi - lo, 1.0, pace=local.pace))
        reply = next(each for each in answers if isinstance(each, Reply))
        replica.adopt(server.read(reply) if isinstance(server, SplitServer) else reply.weights)
    return replica.host_weights()


cuts_of_a_step = st.lists(st.integers(1, SAMPLES - 1), unique=True, min_size=2, max_size=2).map(sorted)


@optimizers
@settings(max_examples=5)
@given(cuts=st.lists(cuts_of_a_step, min_size=STEPS, max_size=STEPS))
def test_any_split_of_steps_is_one_machine_s(name: str, cuts: list[list[int]]) -> None:
    replica = replica_of(name)
    steps = center_descent_of(replica.job, replica.layout)
    server = ParameterServer(BSP(), replica.host_weights(), steps=steps)
    found = shared(BSP(), replica, server, cuts)
    np.testing.assert_allclose(found, one_machine(replica_of(name)), rtol=1e-9, atol=1e-12)


def test_a_frozen_layer_stays_to_the_bit() -> None:
    replica = replica_of("momentum", freeze=["dense1"])
    assert replica.frozen
    steps = center_descent_of(replica.job, replica.layout, replica.model.frozen)
    before = replica.host_weights()
    server = ParameterServer(BSP(), before, kept=replica.frozen, steps=steps)
    found = shared(BSP(), replica, server, [[5, 9]] * STEPS)
    for place in replica.frozen:
        assert found[place].tobytes() == before[place].tobytes()
    np.testing.assert_allclose(found, one_machine(replica_of("momentum", freeze=["dense1"])), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("lars", "clip")])
def test_a_split_server_steps_as_a_whole_one_does(name: str) -> None:
    replica = replica_of(name)
    steps = center_descent_of(replica.job, replica.layout)
    assert steps is not None
    assert steps.splits
    server = SplitServer(BSP(), Snapshot(replica.host_weights()), parts=3, steps=steps)
    found = shared(BSP(), replica, server, [[5, 9]] * STEPS)
    np.testing.assert_allclose(found, one_machine(replica_of(name)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["lars", "clip"])
def test_norms_of_whole_parameters_do_not_split(name: str) -> None:
    replica = replica_of(name)
    steps = center_descent_of(replica.job, replica.layout)
    assert steps is not None
    assert not steps.splits


@optimizers
def test_a_server_goes_on_from_its_snapshot_as_if_nothing_had_been(name: str) -> None:
    replica = replica_of(name)
    steps = center_descent_of(replica.job, replica.layout)
    assert steps is not None
    server = ParameterServer(BSP(), replica.host_weights(), steps=steps)
    server.handle(Join(0, "w", 1))
    for number, (batch, pace) in enumerate(zip(BATCHES, paces(), strict=True), 1):
        replica.step(batch, pace, descends=False)
        gradients, at = replica.gradients.copy(), (pace.lr, pace.progress)
        replica.adopt(answer_of(server, Push(0, "w", number, 1, number - 1, gradients, SAMPLES, 1.0, pace=at)))
        snapshot = server.snapshot()
        cuts = [(0, 100), (100, len(snapshot.center))]
        snapshot = joined_snapshot(snapshot, split_snapshot(snapshot, cuts))
        assert {name for name in snapshot.state or {} if name.endswith(COUNT)}
        server = ParameterServer.restore(BSP(), snapshot, life=0, steps=steps)
        server.handle(Join(0, "w", number + 1))
    np.testing.assert_allclose(replica.host_weights(), one_machine(replica_of(name)), rtol=1e-9, atol=1e-12)


def test_weights_that_a_worker_trained_alone_begin_the_optimizer_anew() -> None:
    replica = replica_of("adamw")
    steps = center_descent_of(replica.job, replica.layout)
    assert steps is not None
    begun = replica.host_weights()
    server = ParameterServer(BSP(), begun, steps=steps)
    server.handle(Join(0, "w", 1))
    replica.step(BATCHES[0], StepPace(0.05), descends=False)
    server.handle(Push(0, "w", 1, 1, 0, replica.gradients.copy(), SAMPLES, 1.0, pace=(0.05, 0.0)))
    answer = answer_of(server, Push(0, "w", 1, 2, 1, begun + 1, SAMPLES, 1.0))
    np.testing.assert_array_equal(answer, begun + 1)
    fresh = steps.begin(begun)
    state = server.snapshot().state or {}
    assert all(np.array_equal(state[name], vector) for name, vector in fresh.items())


@optimizers
@pytest.mark.parametrize("parts", [1, 3])
def test_a_server_goes_on_with_the_state_of_a_worker_that_was_alone(name: str, parts: int) -> None:
    """The worker has made the first two steps itself; the last is made by the server, of its gradients."""
    replica = replica_of(name)
    steps = center_descent_of(replica.job, replica.layout)
    assert steps is not None
    if parts > 1 and not steps.splits:
        pytest.skip("it needs norms of whole parameters")
    begun = Snapshot(replica.host_weights())
    server: Any = SplitServer(BSP(), begun, parts=parts, steps=steps)
    server = server if parts > 1 else ParameterServer(BSP(), begun.center, steps=steps)
    server.handle(Join(0, "w", 1))
    for batch, pace in zip(BATCHES[:-1], paces()[:-1], strict=True):
        replica.step(batch, pace)
    server.handle(Push(0, "w", 1, 1, 0, replica.host_weights(), SAMPLES, 1.0))
    server.go_on_with(steps.kept(replica.host_optimizer()))
    replica.step(BATCHES[-1], paces()[-1], descends=False)
    (answer,) = server.handle(Push(0, "w", 1, 2, 1, replica.gradients.copy(), SAMPLES, 1.0, pace=(*paces()[-1],)))
    found = server.read(answer) if parts > 1 else answer.weights
    np.testing.assert_allclose(found, one_machine(replica_of(name)), rtol=1e-9, atol=1e-12)
