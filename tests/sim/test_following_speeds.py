"""Workers that make every step together: minibatches follow their speeds within rounds, samples between rounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.events import RoundEnded, SamplesAllocated
from daskcnn.job.resolve import resolve
from daskcnn.nn import StepPace
from daskcnn.partition.partitioner import IDPA
from daskcnn.ps import Instruction, Push, Reply, Request
from daskcnn.ps.local_sgd import PART
from daskcnn.show.lines import describe
from daskcnn.sim.cluster import SimulatedCluster, parse_cluster
from daskcnn.sim.learners import LAYERS, Training, clusters_of_points
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import Batch
from daskcnn.training.replica import Replica

from .sim_cases import cluster, of, run, workload


class Watched(Simulation):
    """A simulation that notes its steps. steps: the time of each merge, and each worker's samples in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[tuple[float, dict[str, int]]] = []
        handled = self.server.handle

        def handle(request: Request) -> list[Instruction]:
            found = handled(request)
            merged = [each for each in found if isinstance(each, Reply) and each.seq]
            if isinstance(request, Push) and merged:
                self.steps.append((request.at, {each.worker: each.n_samples for each in merged}))
            return found

        self.server.handle = handle  # type: ignore[method-assign]

    def rate(self, step: int) -> float:
        """Samples a second of the step of this number, from 0."""
        return sum(self.steps[step][1].values()) / (self.steps[step][0] - self.steps[step - 1][0])


def _slowing(*speeds: float, after: float, to: float) -> SimulatedCluster:
    """Workers of which the last one changes its speed."""
    workers: list[dict[str, Any]] = [{"name": f"w{i}", "images_per_second": s} for i, s in enumerate(speeds)]
    workers[-1]["speed"] = {"kind": "drift", "to": to, "seconds": 1e-6, "after": after}
    return parse_cluster({"worker": workers})


def _work(**facts: Any) -> Workload:
    usual: dict[str, Any] = {"samples": 25_600, "batch_size": 256, "epochs": 4, "validation": 0}
    return workload("bsp", partition="idpa", **{**usual, **facts})


@pytest.mark.parametrize(("to", "every"), [(0.25, 1), (0.25, 2), (4.0, 1)])
def test_twenty_steps_after_a_worker_changed_its_speed_all_go_on_at_what_the_speeds_allow(
    to: float, every: int
) -> None:
    """In mid-round; a step has 256 samples at 2,000 a second."""
    after = 0.128 * 50
    watched = Watched(_work(rule={"every": every}), _slowing(1000.0, 1000.0, after=after, to=to))
    watched.run()
    allowed = 1000 * (1 + to)
    first = next(i for i, (at, _) in enumerate(watched.steps) if at > after)
    assert watched.rate(first + 1) < 0.8 * allowed
    assert watched.rate(first + -(-20 // every)) >= 0.95 * allowed


def test_samples_go_where_minibatches_went() -> None:
    """The round in which it happens ends as all its presentations are made; the next begins with other shares."""
    log: list[Any] = []
    watched = Watched(_work(), _slowing(1000.0, 1000.0, after=6.4, to=0.25), emit=log.append)
    watched.run()
    rounds = of(RoundEnded, log)
    assert sum(each.samples for each in rounds) == 4 * 25_600
    assert [sum(each.samples for each in rounds if each.round == n) for n in range(4)] == [25_600] * 4
    assert rounds[0].samples != 12_800
    first, then = of(SamplesAllocated, log)[:2]
    assert first.sizes == {"w0": 12_800, "w1": 12_800}
    assert then.sizes["w0"] == pytest.approx(25_600 * 0.8, rel=0.02)
    assert {sum(sizes.values()) for _, sizes in watched.steps[:100]} == {256}
    assert {sum(sizes.values()) for _, sizes in watched.steps} <= {255, 256, 257}  # both parts are cut into steps
    assert watched.coordinator.rounds is not None
    watched.coordinator.rounds.allocation.check()


@pytest.mark.parametrize(("to", "lines"), [(0.25, 2), (0.85, 1)])
def test_a_line_is_shown_of_shares_that_moved_much(to: float, lines: int) -> None:
    log: list[Any] = []
    Watched(_work(), _slowing(1000.0, 1000.0, after=6.4, to=to), emit=log.append).run()
    told = of(SamplesAllocated, log)
    assert len(told) > 1
    assert sum(len(describe(each)) for each in told) == lines


def test_unequal_workers_with_fixed_costs_wait_little() -> None:
    """1 : 3, each step with a fixed cost, calibrated without it: at most 3 % of the time is spent at the barrier."""
    on = parse_cluster(
        {
            "worker": [
                {"name": "fast", "images_per_second": 3000.0, "latency": 0.002},
                {"name": "slow", "images_per_second": 1000.0, "latency": 0.01},
            ]
        }
    )
    events = run(_work(epochs=6), on)[1]
    rounds = of(RoundEnded, events)
    spent = sum(each.busy + each.wait + each.communication for each in rounds)
    assert sum(each.wait for each in rounds) <= 0.03 * spent


@pytest.mark.parametrize(
    "how", [{"partition": "udpa"}, {"partitioner": IDPA(1, even=True)}, {"rule": {"exchange": "asa"}}]
)
def test_shares_that_are_not_to_follow_stay(how: dict[str, Any]) -> None:
    """Equal ones that are asked for; without a server, those of a round do."""
    work = workload("bsp", **{"partition": "idpa", "samples": 6400, "batch_size": 64, "epochs": 1, **how})
    watched = Watched(work, cluster(1000.0, 300.0))
    watched.run()
    for one, two in pairwise(sizes for _, sizes in watched.steps):
        assert all(abs(samples - two[worker]) <= 1 for worker, samples in one.items())


class Noting(Replica):
    """Notes its minibatches, and the pace of each."""

    made: list[tuple[Batch, StepPace]]

    def step(self, batch: Batch, pace: StepPace, *how: Any, **options: Any) -> tuple[float, int | None]:
        self.made.append((batch, pace))
        return super().step(batch, pace, *how, **options)


def test_a_step_is_still_that_of_one_machine_on_all_its_samples() -> None:
    """With real arithmetic, while shares change: what was learnt from, what was pushed, and where the weights go."""
    train = {"strategy": "bsp", "partition": "idpa", "increments": 1, "batch_size": 32, "epochs": 1, "lr": 0.01}
    job = resolve({"data": {"validation": 40}, "model": {"layers": LAYERS, "dtype": "float64"}, "train": train})
    data, replicas = clusters_of_points(1320, 0), list[Noting]()

    def replica() -> Noting:
        made = Noting(job, data, Device.of("cpu"), clock=lambda: 0.0)
        made.made = []
        return made

    def learner() -> Training:
        replicas.append(replica())
        return Training(replicas[-1], work.rule)

    work = Workload.of_job(job, samples=1280, numbers=1)
    log: list[Any] = []
    watched = Watched(work, _slowing(100.0, 100.0, after=1.0, to=0.2), learner=learner, emit=log.append)
    watched.run()
    assert [[len(batch.labels) for batch, _ in each.made] for each in replicas] == [
        [sizes[name] for _, sizes in watched.steps] for name in watched.replicas
    ]
    assert {each.worker: each.samples for each in of(RoundEnded, log)} == {
        name: sum(sizes[name] for _, sizes in watched.steps) for name in watched.replicas
    }
    assert {sum(sizes.values()) for _, sizes in watched.steps} == {32}
    assert watched.steps[-1][1]["w0"] > 3 * watched.steps[-1][1]["w1"]
    alone = replica()
    for (one, pace), (other, same) in zip(*(each.made for each in replicas), strict=True):
        assert pace == same
        labels = np.concatenate([one.labels, other.labels])
        alone.step(replace(one, x=np.concatenate([one.x, other.x], axis=2), labels=labels, keys=None), pace)
    np.testing.assert_allclose(watched.server.snapshot().center, alone.host_weights(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bandwidth", [4e3, 4e4, 4e5])
def test_local_sgd_meets_as_often_as_the_link_allows(bandwidth: float) -> None:
    """From the second round on; steps are by speed, so that none waits for long: by whole steps of unequal lengths."""
    small = {"samples": 16_000, "batch_size": 10, "epochs": 4, "validation": 0}
    waits, hides = (
        [each for each in of(RoundEnded, run(work, cluster(100, 300, bandwidth=bandwidth))[1]) if each.round]
        for work in (workload("local-sgd", partition="idpa", overlap=overlap, **small) for overlap in (False, True))
    )
    assert len(waits) == 6
    assert [each.pushes for each in hides] == [each.pushes for each in waits]
    assert all(each.communication < 0.3 * other.communication for each, other in zip(hides, waits, strict=True))
    for each in waits:
        whole = each.busy + each.wait + each.communication
        assert each.wait < 0.15 * whole
        assert 0.3 * PART < each.communication / whole <= PART
