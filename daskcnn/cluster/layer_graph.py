"""A layer-sharded step as tasks: load → conv1-fwd on every worker → merge → … → head → … → conv1-bwd.

Shards are results of the step before and stay on their workers; merged layers stay at *home*, the fastest worker. Only
activations and their gradients travel, each cut out where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster import layer_tasks as tasks
from daskcnn.cluster.context import RunContext
from daskcnn.cluster.layer_tasks import Where
from daskcnn.nn import Layout
from daskcnn.partition.sharding import kernel_shards
from daskcnn.sharded import Piece, Stage, cut_pieces, join_pieces

Sources = dict[str, Future]


@dataclass(frozen=True)
class Step:
    """Which minibatch: its number in the run, the pass over the samples, its place in it, and the learning rate."""

    number: int
    presentation: int
    position: int
    lr: float


class LayerGraph:
    """The network's pieces on the workers that are alive, and the tasks of one step after the other."""

    def __init__(self, context: RunContext, stages: Sequence[Stage], layout: Layout) -> None:
        self.context, self.stages, self.layout = context, stages, layout
        measured = {name: context.calibrations[name] for name in context.alive}
        self.home = min(measured, key=lambda name: measured[name].seconds_per_sample)
        self.kernels = [self._kernels(stage) for stage in stages]

    def _kernels(self, stage: Stage) -> dict[str, int]:
        """Kernels of each worker that gets any, by its measured seconds in this layer (Marques et al., eq. 1)."""
        if stage.conv is None or stage.name is None:
            return {}
        seconds = [self.context.calibrations[name].conv_seconds[stage.name] for name in self.context.alive]
        shares = kernel_shards(stage.conv.kernels, seconds)
        return {name: n for name, n in zip(self.context.alive, shares, strict=True) if n}

    def by_worker(self) -> dict[str, dict[str, int]]:
        """Kernels of each layer, worker by worker."""
        return {
            worker: {s.name: own.get(worker, 0) for s, own in zip(self.stages, self.kernels, strict=True) if s.name}
            for worker in self.context.alive
        }

    def place(self, weights: Array, velocity: Array) -> None:
        """Send every piece of these weights (size,) and momentum (parameter_size,) to where it is used."""
        counts = [list(own.values()) for own in self.kernels]
        shards, merged = cut_pieces(self.stages, self.layout, weights, velocity, counts)
        self.shards = [
            {w: self._install(f"{stage.name}-kernels", piece, w) for w, piece in zip(own, pieces, strict=True)}
            for stage, own, pieces in zip(self.stages, self.kernels, shards, strict=True)
        ]
        self.merged = [piece and self._install("merged-weights", piece, self.home) for piece in merged]

    def _install(self, label: str, piece: Piece, worker: str) -> Any:
        return self._submit(label, tasks.install, self.context.send(piece, [worker]), worker=worker)

    def collect(self) -> tuple[Array, Array]:
        """Weights and momentum after the steps submitted so far, on the driver."""
        futures = {
            (i, w): self._submit("collect", tasks.collect, future, worker=w)
            for i, own in enumerate([*self.shards, *({self.home: m} if m else {} for m in self.merged)])
            for w, future in own.items()
        }
        pieces = self.context.gather(futures)
        shards = [[pieces[i, w] for w in own] for i, own in enumerate(self.shards)]
        merged = [m and pieces[i, self.home] for i, m in enumerate(self.merged, start=len(self.stages))]
        return join_pieces(self.stages, self.layout, shards, merged)

    def counters(self, worker: str) -> Future:
        """What this worker spent and moved since it was last asked."""
        return self._submit("counters", tasks.take_counters, worker=worker)

    def submit(self, step: Step) -> Future:
        """Submit a step behind those before it. Returns the future of its score."""
        batch = self._submit("load", tasks.load, step.presentation, step.position, worker=self.home)
        sources, merged, ys = self._forward(batch)
        last = len(self.stages) - 1
        args = last, ys, self.merged[last], batch, list(self.kernels[last].values()), step.lr
        back = self._merged_step(last, self._submit("head", tasks.head, *args, worker=self.home))
        score = self._take("score", tasks.take_score, back)
        self._backward(back, sources, merged, batch, step.lr)
        return score

    def _forward(self, batch: Future) -> tuple[list[Sources], list[Future], list[Future]]:
        """Every stage's input by worker, what every stage but the last was merged to, and the last one's outputs."""
        sources: list[Sources] = [dict.fromkeys([*self.kernels[0], self.home], batch)]
        merged: list[Future] = []
        for i, stage in enumerate(self.stages):
            ys = self._outputs(i, stage, sources[i])
            if i == len(self.stages) - 1:
                break
            args = i, ys, self.merged[i], batch
            merged.append(self._submit(f"{self._label(i)}-merge-fwd", tasks.merge_fwd, *args, worker=self.home))
            sources.append(self._spread(merged[i], self.kernels[i + 1]))
        return sources, merged, ys

    def _outputs(self, i: int, stage: Stage, source: Sources) -> list[Future]:
        """What goes into the stage's merge: the shards' outputs, or the input where it has no convolution."""
        if stage.conv is None:
            return [self._take("take-input", tasks.take_input, source[self.home])]
        return [
            self._submit(f"{stage.name}-fwd", tasks.conv_fwd, i, source[w], shard, worker=w)
            for w, shard in self.shards[i].items()
        ]

    def _spread(self, whole: Future, workers: dict[str, int]) -> Sources:
        """A merged output for each worker: all of it at home, only what travels elsewhere."""
        away = [w for w in workers if w != self.home]
        travelling = self._take("take-x", tasks.take_x, whole) if away else whole
        return {self.home: whole, **dict.fromkeys(away, travelling)}

    def _backward(self, back: Future, sources: list[Sources], merged: list[Future], batch: Future, lr: float) -> None:
        for i in reversed(range(len(self.stages))):
            parts = self._shards_backward(i, back, sources[i], lr)
            if i == 0:
                return
            before = i - 1
            args = before, merged[before], parts, self.merged[before], batch, list(self.kernels[before].values()), lr
            label = f"{self._label(before)}-merge-bwd"
            back = self._merged_step(before, self._submit(label, tasks.merge_bwd, *args, worker=self.home))

    def _shards_backward(self, i: int, back: Future, source: Sources, lr: float) -> list[Future]:
        """The shards' parts of dx; the shards are the next step's from here on."""
        parts, need_dx = [], i > 0
        for j, (worker, shard) in enumerate(list(self.shards[i].items())):
            at_home = worker == self.home
            dy = back if at_home else self._take("take-dy", tasks.take_dy, back, j)
            args = i, j, source[worker], dy, shard, lr, need_dx
            result = self._submit(f"{self._label(i)}-bwd", tasks.conv_bwd, *args, worker=worker)
            self.shards[i][worker] = result
            if need_dx:
                parts.append(result if at_home else self._take("take-dx", tasks.take_dx, result, worker=worker))
        return parts

    def _merged_step(self, i: int, back: Future) -> Future:
        """The stage's merged layers after this step are what `back` holds, if they have weights."""
        if self.merged[i] is not None:
            self.merged[i] = back
        return back

    def _label(self, i: int) -> str:
        return self.stages[i].name or "input"

    def _submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Future:
        where = Where(self.context.name, worker == self.home)
        return self.context.submit(label, function, where, *args, worker=worker)

    def _take(self, label: str, function: Callable[..., Any], *args: Any, worker: str | None = None) -> Future:
        return self.context.submit(label, function, *args, worker=worker or self.home)
