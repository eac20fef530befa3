"""The time of a layer-sharded step by our own scheme: outputs go straight to the workers that need them.

Shards take their stage's spread layers along, so what travels is the pooled map, between all workers of two stages, and
to home for the last layers alone; gradients go the same ways back. Every worker loads the minibatch itself. A step in
one part is its phases one after the other,

    comm + Σ over stages of max_i shard_i + what home does alone.

In s parts, one part goes that way alone; the others follow at the pace of what is busiest, processors or a line:

    (comm + conv + comp)/s + (s - 1)/s · max(conv + comp, the busiest line's seconds).

Communication is then what of that the processors do not compute in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from daskcnn.job.tables import FirstConv
from daskcnn.nn import Sequential, Shape
from daskcnn.sharded import (
    Balance,
    Link,
    Share,
    Stage,
    Traffic,
    phases,
    samples_first,
    shares_of,
    stage_shapes,
    stages_of,
    step_tasks,
    weight_traffic,
)
from daskcnn.sim.papers_step import ShardedStep, Sharding


@dataclass(frozen=True)
class Placed:
    """A stage as it runs, spread as far as pays for its shards, and each worker's share of its channels.

    cut: whether layers that could be spread are not.
    """

    stage: Stage
    shares: Mapping[int, Share]
    cut: bool


def _placed(stage: Stage, kernels: Mapping[int, int]) -> Placed:
    counts = list(kernels.values())
    spread = stage.spread_for(counts)
    return Placed(spread, dict(zip(kernels, shares_of(counts, spread.reach), strict=True)), cut=spread != stage)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _part(share: Share, *, first: bool) -> float:
    """A shard's part of its stage's seconds: the channels next to its own are computed on the way there only.

    That is one of three passes, or of two where the input needs no gradient.
    """
    own, held = _length(share.own), _length(share.held)
    return (own + (held - own) / (2 if first else 3)) / share.total


@dataclass(frozen=True)
class Phase:
    """Numbers, or bytes, that each worker sends and gets before the step can go on."""

    up: tuple[int, ...]
    down: tuple[int, ...]

    def times(self, factor: int) -> Phase:
        return Phase(*(tuple(factor * n for n in way) for way in (self.up, self.down)))


def _added(phases: Sequence[Phase]) -> Phase:
    ups, downs = [phase.up for phase in phases], [phase.down for phase in phases]
    return Phase(tuple(map(sum, zip(*ups, strict=True))), tuple(map(sum, zip(*downs, strict=True))))


@dataclass(frozen=True, kw_only=True)
class Direct(Sharding):
    """A network over these workers as `daskcnn.cluster` runs it.

    shape: of its input (H, W, C). itemsize: bytes of a number on the wire. sub_batches: parts of a minibatch.
    per_task: seconds that each of a step's tasks costs the scheduler, besides `overhead`. given: how many kernels of
    each layer the workers have, by name; None: as the cluster balances them. at: home's name; None: the fastest.
    first_conv: what of the first convolution is divided (train.first_conv); of given kernels, those.
    """

    model: Sequential
    shape: Shape
    sub_batches: int = 1
    per_task: float = 0.0
    given: Mapping[str, Mapping[str, int]] | None = None
    at: str | None = None
    first_conv: FirstConv = "auto"

    @property
    def home(self) -> int:
        """The worker that does what is not sharded."""
        return super().home if self.at is None else [worker.name for worker in self.workers].index(self.at)

    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        """The stages and their shards."""
        number = {worker.name: w for w, worker in enumerate(self.workers)}
        if self.given is None:
            balance = self._balance()
            stages, kernels = balance.stages, balance.kernels()
        else:
            stages = stages_of(self.model)
            stages = samples_first(stages) if self.first_conv == "samples" else stages
            kernels = [dict(self.given.get(stage.name or "", {})) for stage in stages]
        return tuple(
            _placed(stage, {number[name]: n for name, n in own.items() if n})
            for stage, own in zip(stages, kernels, strict=True)
        )

    def by_speed(self) -> Direct:
        """The same with kernels shared out by eq. 1, whatever it takes to send what they need."""
        balance = self._balance()
        named = zip(balance.stages, balance.by_compute, strict=True)
        given = {stage.name: own for stage, own in named if stage.name}
        return replace(self, given=given, first_conv=balance.stages[0].by)

    def _balance(self) -> Balance:
        """What shares go by: seconds a sample of each worker, and its link."""
        home = self.workers[self.home]
        compute = {
            worker.name: {name: each / self.batch for name, each in zip(self.names, seconds, strict=True)}
            for worker, seconds in ((worker, self.conv_seconds(worker)) for worker in self.workers)
        }
        balance = Balance(
            stages_of(self.model),
            self.shape,
            home.name,
            compute,
            {worker.name: Link(self._line(w), worker.latency) for w, worker in enumerate(self.workers)},
            self.batch,
            self.itemsize,
            self.rest_seconds(home) / self.batch,
            {worker.name: (worker.conv_seconds and worker.conv_fixed) or {} for worker in self.workers},
            self.per_task,
            self.parts,
            {worker.name: worker.spread_share for worker in self.workers},
        )
        return balance.divided_by(self.first_conv)

    def _by_layer(self) -> list[tuple[float, ...]]:
        return list(zip(*map(self.conv_seconds, self.workers), strict=True))

    @property
    def parts(self) -> int:
        return min(self.sub_batches, self.batch)

    def step(self) -> ShardedStep:
        """A step of all workers."""
        taken, alone = self._computing()
        conv, comp = sum(map(max, taken)), self.rest_seconds(self.workers[self.home]) + alone
        phases = [phase.times(self.batch * self.itemsize) for phase in self.phases()]
        edges = self._edges().times(self.specs[0].itemsize)
        through, total = sum(map(self._seconds, phases)), _added([edges.times(0), *phases])
        busiest = max(conv + comp, self._seconds(total))
        step = (conv + comp + through) / self.parts + (1 - 1 / self.parts) * busiest + self._seconds(edges)
        more = sum(map(self._latency, [*phases, edges])) + self.overhead + self.per_task * self.tasks
        kernels = tuple(self._kernels(placed) for placed in self.placed if placed.stage.name)
        moved = _added([total, edges])
        comm = max(0.0, step - conv - comp) + more  # rounding alone would make it less than nothing
        return ShardedStep(comm, conv, comp, kernels, taken, moved.up, moved.down, self._busy(taken, comp))

    def division(self) -> dict[str, Any]:
        """What the log says of how layers are divided."""
        convs = [placed.stage for placed in self.placed if placed.stage.conv]
        by = {stage.name: stage.by for stage in convs}
        of = {stage.name: stage.conv.kernels for stage in convs if stage.conv}
        return {"divided": {worker.name: by for worker in self.workers}, "of": of}

    def _kernels(self, placed: Placed) -> tuple[int, ...]:
        shares = placed.shares
        return tuple(_length(shares[w].own) if w in shares else 0 for w in range(len(self.workers)))

    # --- computing ---

    def _computing(self) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Seconds of the shards by layer and worker; and of home with the layers that could be spread and are not."""
        taken, alone, everyone = [], 0.0, range(len(self.workers))
        placed = [(i, each) for i, each in enumerate(self.placed) if each.stage.name]
        for (i, each), whole in zip(placed, self._by_layer(), strict=True):
            apart = [worker.spread_share if each.cut else 0.0 for worker in self.workers]
            parts = {w: self._part(w, share, each.stage, first=i == 0) for w, share in each.shares.items()}
            taken.append(tuple(whole[w] * (1 - apart[w]) * parts.get(w, 0.0) for w in everyone))
            alone += whole[self.home] * apart[self.home]
        return tuple(taken), alone

    def _part(self, w: int, share: Share, stage: Stage, *, first: bool) -> float:
        """A shard's part of its stage's seconds, as measured; else channels computed twice are counted."""
        worker, name = self.workers[w], stage.name or ""
        if stage.by == "kernels" and worker.conv_fixed and worker.conv_seconds:
            fixed = min(1.0, worker.conv_fixed.get(name, 0.0) / worker.conv_seconds[name])
            return fixed + (1 - fixed) * _length(share.own) / share.total
        return _part(share, first=first)

    # --- what travels ---

    def phases(self) -> list[Phase]:
        """Numbers a sample of each message that the step waits for: a stage's outputs, its gradients."""
        found = phases(self._stages, self._in_shapes, self._by_name, self.workers[self.home].name)
        return [self._of(phase.moved) for phase in found]

    def _of(self, moved: Mapping[str, Traffic]) -> Phase:
        each = [moved.get(worker.name, Traffic(0, 0)) for worker in self.workers]
        return Phase(tuple(t.up for t in each), tuple(t.down for t in each))

    def _edges(self) -> Phase:
        """Numbers a step of the neighbours' kernels that shards compute with besides their own."""
        return self._of(weight_traffic(self._stages, self._in_shapes, self._by_name))

    @property
    def _stages(self) -> list[Stage]:
        return [placed.stage for placed in self.placed]

    @property
    def _in_shapes(self) -> list[Shape]:
        return stage_shapes(self._stages, self.shape)

    @property
    def _by_name(self) -> list[dict[str, int]]:
        """How many kernels each worker has that has any."""
        names = [worker.name for worker in self.workers]
        return [{names[w]: _length(s.own) for w, s in placed.shares.items()} for placed in self.placed]

    def _line(self, worker: int) -> float:
        """Bytes a second of a worker's link each way."""
        own = self.workers[worker].bandwidth or math.inf
        return min(own, self.bandwidth) if worker == self.home else own

    def _seconds(self, phase: Phase) -> float:
        """Until the busiest line has carried its bytes, those of one way at the same time as those of the other."""
        ways = zip(phase.up, phase.down, strict=True)
        return max(max(up, down) / self._line(w) for w, (up, down) in enumerate(ways))

    def _latency(self, phase: Phase) -> float:
        """Of the slowest message."""
        ways = zip(self.workers, phase.up, phase.down, strict=True)
        return max((worker.latency for worker, up, down in ways if up or down), default=0.0)

    @property
    def tasks(self) -> int:
        """Of a step."""
        return step_tasks(self._stages, self._by_name, self.workers[self.home].name, self.parts)
