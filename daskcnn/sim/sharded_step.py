"""The time of a layer-sharded step by our own scheme: outputs go straight to the workers that need them.

Shards take their stage's spread layers along, so the pooled map travels, between all workers of two stages, and to home
for the last layers alone; gradients go the same ways back. Every worker loads the minibatch itself. A step in one part
is its phases one after the other,

    comm + Σ over stages of max_i shard_i + what home does alone.

In s parts, one part goes that way alone; the others follow at the pace of the busiest, processors or a line:

    (comm + conv + comp)/s + (s - 1)/s · max(conv + comp, the busiest line's seconds).

Communication is then the part of that in which the processors do not compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from daskcnn.job.tables import FirstConv, KernelShares
from daskcnn.nn import Sequential, Shape
from daskcnn.sharded.balance import ShareSearch, WorkerLink, added_traffic, weight_traffic
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.plan_parts import Kernels, WorkerTraffic
from daskcnn.sharded.stages import Stage, samples_first
from daskcnn.sharded.step_plan import StepPlan
from daskcnn.sim.cluster import Worker
from daskcnn.sim.papers_costs import ShardedStep, Sharding

Moved = Mapping[str, WorkerTraffic]
"""Bytes that each worker sends and receives before the step can go on; those that do neither are left out."""


def _times(factor: int, moved: Moved) -> Moved:
    return {name: WorkerTraffic(factor * up, factor * down) for name, (up, down) in moved.items()}


@dataclass(frozen=True, kw_only=True)
class Direct(Sharding):
    """A network over these workers as `daskcnn.cluster` runs it: the time of its plan.

    shape: of its input (H, W, C). itemsize: bytes of a number on the wire. sub_batches: parts of a minibatch.
    per_task: seconds that each of a step's tasks costs the scheduler, besides `overhead`. given: kernels of each layer
    and worker, by name; None: as the cluster balances them. at: home's name; None: the fastest. first_conv,
    kernel_shares: as in `[train]`; of given kernels, the first convolution is divided as they are.
    """

    model: Sequential
    shape: Shape
    sub_batches: int = 1
    per_task: float = 0.0
    given: Mapping[str, Mapping[str, int]] | None = None
    at: str | None = None
    first_conv: FirstConv = "auto"
    kernel_shares: KernelShares = "measured"

    @property
    def home(self) -> int:
        """The worker of the layers that are not sharded."""
        return super().home if self.at is None else [worker.name for worker in self.workers].index(self.at)

    @cached_property
    def plan(self) -> StepPlan:
        """The step, as the cluster plans it."""
        (stages, kernels), home = self._cut, self.workers[self.home].name
        sizes = {"samples": self.batch, "itemsize": self.itemsize, "weight_itemsize": self.specs[0].itemsize}
        return StepPlan.of(stages, self.shape, kernels, home, parts=self.parts, **sizes)

    @cached_property
    def _cut(self) -> tuple[Sequence[Stage], list[dict[str, int]]]:
        """The stages with all that can be spread of them, and each worker's kernels."""
        if self.given is None:
            balance = self.balance()
            return balance.stages, balance.kernels()
        stages = stages_of(self.model)
        stages = samples_first(stages) if self.first_conv == "samples" else stages
        by_layer = (self.given.get(stage.name or "", {}) for stage in stages)
        return stages, [{name: n for name, n in own.items() if n} for own in by_layer]

    def why_no_shorter(self) -> str:
        """Return the reason why one more worker like the last does not shorten the step.

        It is why that one, or one that is alike, gets no kernels, or the parts of the step if none is idle.
        """
        unused, last = self.balance().unused(self.plan.kernels), self.workers[-1]
        alike = (worker.name for worker in self.workers if worker.model_copy(update={"name": last.name}) == last)
        for name in alike:
            if name in unused:
                return unused[name]
        step = self.step()
        return (
            f"of a step of {step.seconds:.2g} s, {step.comm:.2g} s go to sending and to handing out tasks, and "
            f"{step.comp:.2g} s to what one worker does alone"
        )

    def by_speed(self) -> Direct:
        """Return the same with kernels shared out by eq. 1, regardless of communication."""
        balance = self.balance()
        return self.cut(balance.stages, balance.by_compute)

    def cut(self, stages: Sequence[Stage], kernels: Kernels) -> Direct:
        """Return the same with these shares of the stages of its search."""
        given = {stage.name: own for stage, own in zip(stages, kernels, strict=True) if stage.name}
        return replace(self, given=given, first_conv=stages[0].by)

    def balance(self) -> ShareSearch:
        """Return the search for shares, by seconds a sample of each worker and its link."""
        home = self.workers[self.home]
        compute = {
            worker.name: {name: each / self.batch for name, each in zip(self.names, seconds, strict=True)}
            for worker, seconds in ((worker, self.conv_seconds(worker)) for worker in self.workers)
        }
        search = ShareSearch(
            stages_of(self.model),
            self.shape,
            home.name,
            compute,
            {worker.name: WorkerLink(self._lines[worker.name], worker.latency) for worker in self.workers},
            self.batch,
            self.itemsize,
            self.rest_seconds(home) / self.batch,
            {worker.name: self._fixed(worker) for worker in self.workers},
            self.per_task,
            self.parts,
            {worker.name: worker.spread_share for worker in self.workers},
        )
        return search.asked_for(self.kernel_shares, self.first_conv)

    @property
    def parts(self) -> int:
        """Parts that a minibatch is cut into."""
        return min(self.sub_batches, self.batch)

    def step(self) -> ShardedStep:
        """Return a step of all workers."""
        plan, (taken, alone) = self.plan, self._computing()
        conv, comp = sum(map(max, taken)), self.rest_seconds(self.workers[self.home]) + alone
        flows = [_times(plan.samples * plan.itemsize, flow.moved) for flow in plan.flows]
        between = _times(plan.weight_itemsize, weight_traffic(plan))
        through, total = sum(map(self._seconds, flows)), added_traffic(flows)
        busiest = max(conv + comp, self._seconds(total))
        step = (conv + comp + through) / self.parts + (1 - 1 / self.parts) * busiest + self._seconds(between)
        more = sum(map(self._latency, [*flows, between])) + self.overhead + self.per_task * plan.task_count
        comm = max(0.0, step - conv - comp) + more  # rounding alone would make it less than nothing
        moved = added_traffic([total, between])
        up, down = zip(*(moved.get(name, (0, 0)) for name in self._names), strict=True)
        kernels = tuple(tuple(plan.kernels[i].get(name, 0) for name in self._names) for i in self._staged)
        return ShardedStep(comm, conv, comp, kernels, taken, up, down, self._busy(taken, comp))

    def division(self) -> dict[str, Any]:
        """Return the division of layers, for the log."""
        convs = [stage for stage in self.plan.stages if stage.conv]
        by = {stage.name: stage.by for stage in convs}
        of = {stage.name: stage.conv.kernels for stage in convs if stage.conv}
        return {"divided": {worker.name: by for worker in self.workers}, "of": of}

    @property
    def _names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    @cached_property
    def _staged(self) -> list[int]:
        """The stage of each convolution, in the order of `names`."""
        found = {stage.name: i for i, stage in enumerate(self._cut[0])}
        return [found[name] for name in self.names]

    # --- computing ---

    def _fixed(self, worker: Worker) -> dict[str, float]:
        """Return a worker's seconds a sample that a shard of each layer takes whatever its size, if measured."""
        known = (worker.conv_seconds and worker.conv_fixed) or {}
        return {name: known[name] for name in self.names if name in known}

    def _computing(self) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Return seconds of shards by layer and worker, and of home with layers that could be spread and are not."""
        plan, taken, alone = self.plan, [], 0.0
        for i, whole in zip(self._staged, zip(*map(self.conv_seconds, self.workers), strict=True), strict=True):
            merged = plan.stages[i] != self._cut[0][i]
            apart = [worker.spread_share if merged else 0.0 for worker in self.workers]
            parts = [self._part(i, w) if name in plan.kernels[i] else 0.0 for w, name in enumerate(self._names)]
            taken.append(tuple(s * (1 - a) * part for s, a, part in zip(whole, apart, parts, strict=True)))
            alone += whole[self.home] * apart[self.home]
        return tuple(taken), alone

    def _part(self, i: int, w: int) -> float:
        """Return a shard's part of its stage's seconds: measured, or as planned with channels computed twice."""
        plan, worker, stage = self.plan, self.workers[w], self.plan.stages[i]
        if stage.by == "kernels" and worker.conv_fixed and worker.conv_seconds:
            name = stage.name or ""
            fixed = min(1.0, worker.conv_fixed.get(name, 0.0) / worker.conv_seconds[name])
            return fixed + (1 - fixed) * plan.kernels[i][worker.name] / plan.made[i]
        return plan.work(i, worker.name)

    # --- traffic ---

    @cached_property
    def _lines(self) -> dict[str, float]:
        """Bytes a second of each worker's link each way."""
        lines = {worker.name: worker.bandwidth or math.inf for worker in self.workers}
        home = self.workers[self.home].name
        return lines | {home: min(lines[home], self.bandwidth)}

    def _seconds(self, moved: Moved) -> float:
        """Return the seconds until the busiest line has carried its bytes, those of both ways at once."""
        return max((max(own) / self._lines[name] for name, own in moved.items()), default=0.0)

    def _latency(self, moved: Moved) -> float:
        """Return the latency of the slowest message."""
        return max((worker.latency for worker in self.workers if any(moved.get(worker.name, ()))), default=0.0)
