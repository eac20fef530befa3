"""The price of steps whose kernels are sharded: by all workers (`layer`), or by groups of them that meet by `bsp`.

The search for shares (`sharded.balance`) says what a step takes, by each stage's seconds and each link. A run that
chooses has neither: it has measured whole steps, convolutions, and ways to the server. So stages are estimated, each as
its convolution and the usual part for the layers that are spread with it, and a link between two workers as the slower
of their ways to the server. What Dask takes for a task, and from one task to the next on another worker, is that of
other clusters (`TASK`, `HANDOVER`). A price of such parts says that it is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import numpy as np

from daskcnn.errors import JobError
from daskcnn.events import CalibratedWorker
from daskcnn.job.network import network_of
from daskcnn.job.resolve import turned
from daskcnn.job.tables import LAYER, Job
from daskcnn.nn import Shape, walk
from daskcnn.nn.layers import Auxiliary
from daskcnn.partition.proportions import form_groups
from daskcnn.sharded.balance import SPREAD_SHARE, ShareSearch, WorkerLink, WorkerLinks
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.stages import Stage
from daskcnn.store import Described
from daskcnn.training.strategy_prices import PricedStrategy, Pricer, StepProblem, WorkerCost, priced_set

TASK = 1.9e-3
"""Seconds of Dask's scheduler for a task of a step (`benchmarks/network/results/cluster_netns.json`)."""
HANDOVER = 6e-3
"""Seconds from a task to the next one on another worker, besides its bytes (`benchmarks/studies/layer_scaling.py`)."""

_PROMISING = 1.5
"""Times the fastest worker's step that rough shares may take for better ones to be looked for."""


class StageMeasurements(Protocol):
    """A worker's measurements of its stages."""

    @property
    def conv_seconds(self) -> Mapping[str, float]:
        """Seconds a sample of each stage."""

    @property
    def conv_fixed(self) -> Mapping[str, float]:
        """The part of them that any shard takes."""

    @property
    def rest_seconds(self) -> float | None:
        """Seconds a sample of what home does alone."""


def share_search(
    job: Job,
    in_shape: Shape,
    samples: int,
    stages: Sequence[Stage],
    home: str,
    measured: Mapping[str, StageMeasurements],
    links: WorkerLinks,
) -> ShareSearch:
    """Return the search for the best shares of these workers, whatever shares and first convolution the job asks for.

    in_shape: (H, W, C); samples: those trained on.
    """
    whole = np.dtype(job.model.dtype).itemsize
    return ShareSearch(
        stages,
        in_shape,
        home,
        {name: own.conv_seconds for name, own in measured.items()},
        links.by_worker,
        samples=min(job.train.batch_size, samples),
        itemsize=whole if job.cluster.maps == "float32" else np.dtype(job.cluster.maps).itemsize,
        rest=measured[home].rest_seconds or 0.0,
        fixed={name: own.conv_fixed for name, own in measured.items()},
        task=links.task,
        parts=min(job.train.sub_batches, job.train.batch_size),
        weight_itemsize=whole,
    )


@dataclass(frozen=True)
class ShardedPrices:
    """The prices of a job's sharded steps.

    layer, groups: the job may be trained so. task, handover: Dask's seconds. dispatch: seconds of a step besides.
    measured: task and links are, and no estimates.
    """

    job: Job
    in_shape: Shape
    stages: Sequence[Stage]
    layer: bool
    groups: bool
    task: float = TASK
    handover: float = HANDOVER
    dispatch: float = 0.0
    measured: bool = False

    @classmethod
    def of(cls, job: Job, images: Described) -> Self | None:
        """Return the prices of a job that chooses its strategy; None if its network cannot be sharded."""
        network = network_of(job, images)
        try:
            stages = stages_of(network)
        except ValueError:  # layers of several stages are tied
            return None
        inside = walk(network, images.shape, composite=True)
        if not any(stage.conv for stage in stages) or any(isinstance(layer, Auxiliary) for _, layer, _ in inside):
            return None
        # a group's optimizer sees its own part of a step: only linear steps are those of one machine
        groups = job.train.optimizer.name == "sgd" and _fits(job, "bsp", 2)
        return cls(job, images.shape, stages, _fits(job, LAYER, 1), groups)

    def pricers(self, rows: Mapping[str, CalibratedWorker]) -> Iterator[Pricer]:
        """Yield what prices these workers' steps."""
        if self.layer:
            yield partial(self._layer_steps, rows)
        if self.groups:
            yield partial(self._group_steps, rows)

    def _layer_steps(self, rows: Mapping[str, CalibratedWorker], problem: StepProblem) -> Iterator[PricedStrategy]:
        """Yield the step over all workers; its search leaves out those without use."""
        search = self._search(rows, problem, problem.workers)
        if search is None or len(problem.workers) < 2:
            return
        search, kernels = self._shared(search, problem)
        used = {name for own in kernels for name in own}
        if len(used) > 1:
            samples = {own.name: problem.samples for own in problem.workers if own.name in used}
            seconds = self.dispatch + search.step_seconds(kernels)
            compute = replace(search, links={}, task=0.0).step_seconds(kernels)
            exchange, estimated = max(0.0, seconds - compute), self._estimated(rows)
            yield PricedStrategy(LAYER, samples, compute, exchange, problem.samples, estimated=estimated)

    def _shared(self, search: ShareSearch, problem: StepProblem) -> tuple[ShareSearch, list[dict[str, int]]]:
        """Return kernels of each stage by worker, and their search: the best where that step may be the shortest."""
        roughly, train = search.roughly, self.job.train
        alone = min(own.seconds(search.samples) for own in problem.workers)
        if search.step_seconds(roughly) > _PROMISING * alone:
            return search, roughly
        asked = search.asked_for(train.kernel_shares, train.first_conv)
        return replace(search, stages=asked.stages), asked.kernels()

    def _group_steps(self, rows: Mapping[str, CalibratedWorker], problem: StepProblem) -> Iterator[PricedStrategy]:
        """Yield `bsp` of groups of two, and of two groups."""
        workers = {own.name: own for own in problem.workers}
        for size in sorted({2, len(workers) // 2} - {0, 1}):
            if len(workers) < 2 * size:
                return
            formed = form_groups({name: own.seconds(problem.samples) for name, own in workers.items()}, size)
            groups = {names: self._as_one(rows, problem, [workers[each] for each in names]) for names in formed.groups}
            costs = tuple(replace(own, name=str(i)) for i, own in enumerate(groups.values()) if own is not None)
            if len(costs) == len(groups):
                step = priced_set(replace(problem, workers=costs, ahead=0.0), [own.name for own in costs])
                each = {name: step.samples[str(i)] for i, names in enumerate(groups) for name in names}
                yield replace(step, samples=each, group=size, estimated=self._estimated(rows))

    def _as_one(
        self, rows: Mapping[str, CalibratedWorker], problem: StepProblem, members: Sequence[WorkerCost]
    ) -> WorkerCost | None:
        """Return a group as a worker whose link is its home's; None if its stages are not known."""
        search, many = self._search(rows, problem, members), problem.samples
        if search is None or many < 2:
            return None
        few = replace(search, samples=many // 2)
        whole, half = (self.dispatch + own.step_seconds(own.roughly) for own in (search, few))
        each = max(0.0, whole - half) / (many - many // 2)
        home = next(own for own in members if own.name == search.home)
        return WorkerCost(home.name, max(0.0, whole - each * many), each, home.link)

    def _search(
        self, rows: Mapping[str, CalibratedWorker], problem: StepProblem, workers: Sequence[WorkerCost]
    ) -> ShareSearch | None:
        """Return the search for shares of these workers; None if one has not measured its convolutions."""
        home = min(workers, key=lambda own: own.seconds(problem.samples))
        measured, links = dict[str, CalibratedWorker](), dict[str, WorkerLink]()
        for own in workers:
            row = self._staged(rows[own.name.removeprefix("another ")], own.seconds(problem.samples) / problem.samples)
            if row is None:
                return None
            bandwidth = min(own.link.bandwidth, problem.bandwidth) if own is home else own.link.bandwidth
            measured[own.name] = row
            links[own.name] = WorkerLink(bandwidth, own.link.latency, max(self.handover, own.link.handover))
        of_all = WorkerLinks(links, self.task)
        return share_search(self.job, self.in_shape, problem.samples, self.stages, home.name, measured, of_all)

    def _staged(self, row: CalibratedWorker, seconds: float) -> CalibratedWorker | None:
        """Return the row with each stage's seconds, measured or estimated. seconds: of a sample of a whole step."""
        names = [stage.name for stage in self.stages if stage.conv and stage.name]
        if not row.conv_seconds.keys() >= {*names}:
            return None
        if row.rest_seconds is not None:
            return row
        convolving = sum(row.conv_seconds[name] for name in names)
        spread = min(1 / (1 - SPREAD_SHARE), seconds / max(convolving, 1e-12))
        whole = {name: spread * row.conv_seconds[name] for name in names}
        part = min(1.0, (row.step_fixed or 0.0) / (self.job.train.batch_size * seconds))
        fixed = {name: part * each for name, each in whole.items()}
        rest = max(0.0, seconds - sum(whole.values()))
        return row.model_copy(update={"conv_seconds": whole, "conv_fixed": fixed, "rest_seconds": rest})

    def _estimated(self, rows: Mapping[str, CalibratedWorker]) -> bool:
        return not self.measured or any(row.rest_seconds is None for row in rows.values())


def _fits(job: Job, strategy: str, size: int) -> bool:
    try:
        turned(job, strategy, size)
    except JobError:
        return False
    return True
