"""The strategies of a job on a cluster, by their expected seconds: `daskcnn plan JOB --strategies`."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

import numpy as np

from daskcnn.errors import JobError
from daskcnn.job.tables import LAYER
from daskcnn.planning.simulate import Scenario
from daskcnn.sim.cluster import SimulatedCluster, Worker, step_problem
from daskcnn.training.strategy_choice import (
    STRATEGIES,
    PricedStrategy,
    StepProblem,
    StrategyChoice,
    WorkerCost,
    choose,
)


def compare_strategies(chosen: Scenario) -> StrategyChoice:
    """Return the strategy for the job's network and minibatch on its cluster, whatever strategy the job names.

    `layer` is compared where its tasks are priced: a data-parallel run has not measured them.
    """
    measured = Path(chosen.source).is_dir()
    priced = not measured or chosen.cluster.costs.task > 0
    return choose(problem_of(chosen), (*STRATEGIES, _Sharded(chosen)) if priced else STRATEGIES)


def problem_of(chosen: Scenario) -> StepProblem:
    """Return the step of a job on a simulated cluster, with the costs that a simulation goes by."""
    job = chosen.job
    samples = min(job.train.batch_size, chosen.samples)
    nbytes = chosen.numbers * np.dtype(job.cluster.wire).itemsize
    return step_problem(chosen.cluster.members(), samples, nbytes, chosen.cluster, job.cluster.ps_shards)


class _Sharded:
    """The price of `layer`, by the plan of its step over these workers."""

    def __init__(self, chosen: Scenario) -> None:
        self._chosen = chosen
        self._known = {own.name: own for own in chosen.cluster.members()}

    def __call__(self, problem: StepProblem) -> Iterator[PricedStrategy]:
        """Yield the step over all workers; its plan leaves out those without use."""
        if len(problem.workers) < 2:
            return
        server = self._chosen.cluster.server.model_copy(update={"bandwidth": _finite(problem.bandwidth)})
        members = [self._member(own) for own in problem.workers]
        cluster = SimulatedCluster(server=server, costs=self._chosen.cluster.costs, worker=members)
        try:
            sharding = self._chosen.sharding(cluster)
            step = sharding.step()
        except (JobError, ValueError):  # no convolution, or one that cannot be divided
            return
        used = [own.name for own in members if any(own.name in own_kernels for own_kernels in sharding.plan.kernels)]
        if len(used) > 1:
            compute = min(step.seconds, step.conv + step.comp)
            samples = dict.fromkeys(used, sharding.batch)
            yield PricedStrategy(LAYER, samples, compute, step.seconds - compute, sharding.batch)

    def _member(self, own: WorkerCost) -> Worker:
        like = self._known.get(own.name) or self._known[own.name.removeprefix("another ")]
        link = {"bandwidth": _finite(own.link.bandwidth), "latency": own.link.latency}
        return like.model_copy(update={"name": own.name, "count": 1, **link})


def _finite(bandwidth: float) -> float | None:
    return None if bandwidth == inf else bandwidth
