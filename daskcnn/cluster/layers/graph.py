"""A layer-sharded step as tasks: conv1-fwd on every worker → conv2-fwd → … → head → … → conv1-bwd.

Shards are results of the step before and stay on their workers. Outputs of a stage go straight to all workers of the
next one, their gradients straight back to who made them; only layers that need all channels are at *home*, the fastest
worker. Where the last shards send sums, everybody adds them up and the head is part of the way back (`judges`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dask.task_spec import Alias
from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.layers import tasks
from daskcnn.cluster.layers.balance import balance_of, fastest
from daskcnn.cluster.layers.messages import ALL
from daskcnn.cluster.layers.task_context import Minibatch, Part, Where, batch_plan
from daskcnn.cluster.layers.transfers import Cuts
from daskcnn.cluster.run_context import Bundle, RunContext
from daskcnn.nn import Layout
from daskcnn.sharded import (
    Balance,
    By,
    Piece,
    Share,
    Stage,
    cut_pieces,
    edges_travel_along,
    join_pieces,
    judged_by_all,
    judges,
    neighbours,
    shares_of,
)
from daskcnn.store import BatchPlan

Result: TypeAlias = Future | Alias
"""Of a task that is submitted, or that is about to be."""
Sources: TypeAlias = list[Result]


@dataclass(frozen=True)
class Step:
    """Which minibatch: its number in the run, the pass over the samples, its place in it, its size; the rate."""

    number: int
    presentation: int
    position: int
    lr: float
    samples: int


@dataclass
class Passed:
    """What a part of a step's way there leaves for its way back: its minibatch, merged stages' results."""

    of: Minibatch
    merged: dict[int, Result]


@dataclass
class Before:
    """What the last step has left: pieces after their step, shards' edges; in the tasks' order, by stage and worker.

    owed: stages by samples whose shards have their gradients only, and at which rate they are to make their step.
    """

    shards: list[dict[str, Any]]
    merged: dict[int, dict[str, Any]]
    edges: list[dict[str, Any]]
    owed: dict[int, float]


class LayerGraph:
    """The network's pieces on the workers that are alive, and the tasks of one step after the other."""

    def __init__(
        self,
        context: RunContext,
        stages: Sequence[Stage],
        layout: Layout,
        *,
        balance: Balance | None = None,
        generation: int = 0,
    ) -> None:
        self.context, self.layout = context, layout
        self.balance = balance or balance_of(context, stages, fastest(context))
        self.home = self.balance.home
        self.kernels = self.balance.kernels()
        self.stages = [
            s.spread_for(list(own.values())) for s, own in zip(self.balance.stages, self.kernels, strict=True)
        ]
        self.shares = [self._shares(stage, own) for stage, own in zip(self.stages, self.kernels, strict=True)]
        self.judges = judges(self.stages, self.kernels, self.home)
        busy = {self.home, *(worker for own in self.kernels for worker in own)}
        self.workers = [worker for worker in context.alive if worker in busy]
        self._last = len(self.stages) - 1
        self._by_all = judged_by_all(self.stages, self.kernels, self.home)
        self._owed: dict[int, float] = {}
        self.generation = generation
        # of the step that is put together: its tasks, what came before it, its last head, which part of the minibatch
        self._bundle: Bundle | None = None
        self._before: Any = None
        self._head: Result | None = None
        self._at = 0, 1, 0

    @staticmethod
    def _shares(stage: Stage, kernels: dict[str, int]) -> dict[str, Share]:
        return dict(zip(kernels, shares_of(list(kernels.values()), stage.reach), strict=True))

    def by_worker(self) -> dict[str, dict[str, int]]:
        """Kernels of each layer, worker by worker; of one that is divided by samples, its part in as many."""
        return {
            worker: {s.name: own.get(worker, 0) for s, own in zip(self.stages, self.kernels, strict=True) if s.name}
            for worker in self.context.alive
        }

    def divided(self) -> dict[str, dict[str, By]]:
        """What of each layer is divided, worker by worker."""
        by = {stage.name: stage.by for stage in self.stages if stage.name}
        return dict.fromkeys(self.context.alive, by)

    def of(self) -> dict[str, int]:
        """All kernels of each layer."""
        return {stage.name: stage.conv.kernels for stage in self.stages if stage.name and stage.conv}

    # --- the pieces ---

    def place(self, weights: Array, velocity: Array, step: int) -> None:
        """Send every piece of these weights (size,) and momentum (parameter_size,) to where this step will use it."""
        counts = [list(own.values()) for own in self.kernels]
        shards, merged = cut_pieces(self.stages, self.layout, weights, velocity, counts)
        self.generation += 1
        self._step, self._owed = step, {}
        self._weighted = {i for i, piece in enumerate(merged) if piece}
        self.shards = [
            {w: self._install(self._part(i, share), piece, w) for (w, share), piece in zip(own, pieces, strict=True)}
            for i, (own, pieces) in enumerate(zip((s.items() for s in self.shares), shards, strict=True))
        ]
        self.merged = {
            i: {w: self._install(self._part(i), p, w) for w in self._holders(i)} for i, p in enumerate(merged) if p
        }
        self.edges = [dict(own) for own in self.shards]

    def _install(self, part: Part, piece: Piece, worker: str) -> Future:
        sent = self.context.send(piece, [worker])
        return self._submit(f"{self._label(part.stage)}-weights", tasks.install, part, sent, worker=worker)

    def collect(self, gather: Callable[[dict[int, Future]], dict[int, Any]]) -> tuple[Array, Array]:
        """Weights and momentum after the steps submitted so far, on the driver; `gather` waits for the pieces."""
        return self.joined(gather(self.pieces()))

    def pieces(self) -> dict[int, Future]:
        """All pieces after the steps submitted so far, on their way to the driver."""
        self._step_owed()
        shards = [
            self._collect(self._part(i, share), w) for i, own in enumerate(self.shares) for w, share in own.items()
        ]
        return dict(enumerate([*shards, *(self._collect(self._part(i), self.home) for i in self._weighted)]))

    def joined(self, pieces: Mapping[int, Any]) -> tuple[Array, Array]:
        """Weights and momentum from these pieces."""
        found = iter([pieces[i] for i in range(len(pieces))])
        kernels = [[next(found) for _ in own] for own in self.shares]
        whole = dict(zip(self._weighted, found, strict=True))
        return join_pieces(self.stages, self.layout, kernels, [whole.get(i) for i in range(len(self.stages))])

    def _collect(self, part: Part, worker: str) -> Future:
        """Behind what the last step does with the piece."""
        behind = (self.merged if part.share is None else self.shards)[part.stage][worker]
        return self._submit("collect", tasks.collect, part, behind, worker=worker)

    def counters(self, worker: str) -> Future:
        """What this worker spent and moved since it was last asked."""
        return self._submit("counters", tasks.take_counters, worker=worker)

    # --- a step ---

    def submit(self, step: Step) -> Future:
        """Submit a step behind those before it, all of its tasks at once. Returns the future of its score."""
        self._bundle = self.context.bundle()
        # kept until the tasks that use them are there
        self._before = Before(*self._present(), self._owed)
        self._owed = {}
        subs = min(self.context.job.train.sub_batches, step.samples)
        for sub in range(subs):
            self._at = sub, subs, step.samples
            self._head = self._part_of(step)
        score = self._submitted(self._submit("score", tasks.take_score, self._head, worker=self.home))
        self._head, self._step = None, self._step + 1
        return score

    def _submitted(self, wanted: Any) -> Future:
        """Send off what was bundled; the future of one result, beside those of what is left for the next step."""
        assert self._bundle is not None, "begun with what is sent"
        left: list[dict[Any, Any]] = [*self.shards, *self.merged.values(), *self.edges]
        refs = [wanted, *(ref for own in left for ref in own.values() if isinstance(ref, Alias))]
        futures = self._bundle.submit(refs)
        for own in left:
            own.update({name: futures.get(ref.key, ref) for name, ref in own.items()})
        self._bundle, self._before = None, None
        return futures[wanted.key]

    def _present(self) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Pieces and edges as they are now, whatever takes their places."""
        merged = {i: dict(own) for i, own in self.merged.items()}
        return [dict(own) for own in self.shards], merged, [dict(own) for own in self.edges]

    def _part_of(self, step: Step) -> Result:
        """Note the tasks of a part of the step's minibatch; the head's result."""
        passed = Passed(self._minibatch(step), {})
        sources: Sources = []
        for i in range(self._last):
            sources = self._merge(i, self._shards_forward(i, sources, passed), passed)
        sources = self._shards_forward(self._last, sources, passed)
        if self._by_all:
            self._backward(dict.fromkeys(self.judges, sources), passed, step.lr)
            return self.shards[self._last][self.home]
        behind = [self._head] if self._head else self._behind(self._last)
        args = sources, passed.of, step.lr, self._cuts(self._last), *behind
        part = self._part(self._last, away=len({*self.shares[self._last]} - {self.home}))
        back = self._submit("head", tasks.head, part, *args, worker=self.home)
        back = self._merged_step(self._last, back)
        self._backward(self._handed(back, self._last), passed, step.lr)
        return back

    def _minibatch(self, step: Step) -> Minibatch:
        plan, begin = self._plan(step.presentation), step.position * self.context.job.train.batch_size
        return Minibatch(plan, begin, begin + step.samples)

    def _plan(self, presentation: int) -> BatchPlan:
        return batch_plan(self.context.job, self.context.samples, presentation)

    def _shards_forward(self, i: int, sources: Sources, passed: Passed) -> Sources:
        """The shards' outputs of a stage whose inputs these are (none: the batch); nothing where it has no shards."""
        ys = []
        for w, share in self.shares[i].items():
            beside = list(neighbours(self.shares[i], w))
            edges, ends = [self._before.edges[i][other] for other, _, _ in beside], tuple(each[1:] for each in beside)
            part = self._part(i, share, away=self._away(i, w))
            gradients, lr = self._gradients_of_all(i)
            args = part, sources, edges, ends, passed.of, gradients, lr, self._before.shards[i][w]
            ys.append(self._submit(f"{self._label(i)}-fwd", tasks.shard_fwd, *args, worker=w))
        return ys

    def _merge(self, i: int, ys: Sources, passed: Passed) -> Sources:
        """The next stage's inputs: the shards' outputs, or what those are put together to."""
        if self.stages[i].rest is None:
            return ys
        part = self._part(i, away=len({*self.shares[i + 1]} - {self.home}))
        behind = [self._before.merged[i][self.home]] if i in self._weighted else []
        args = part, ys, passed.of, *behind
        label = f"{self._label(i)}-merge-fwd"
        passed.merged[i] = self._submit(label, tasks.merge_fwd, *args, worker=self.home)
        return [passed.merged[i]]

    def _gradients_of_all(self, i: int) -> tuple[Sources, float]:
        """Of the step before, where a stage's shards are yet to make it by them; and at which rate."""
        lr = self._before.owed.get(i)
        return ([], 0.0) if lr is None else ([*self._before.shards[i].values()], lr)

    def _backward(self, dys: dict[str, Sources], passed: Passed, lr: float) -> None:
        """From the head's gradients, or the sums it is for, to every shard's; the pieces are the next step's then."""
        for i in reversed(range(len(self.stages))):
            dxs = self._shards_backward(i, dys, passed, lr)
            if i == 0:
                return
            if i - 1 in passed.merged:
                cuts = self._cuts(i - 1)
                behind = passed.merged[i - 1], *self._behind(i - 1)
                args = self._part(i - 1), dxs[self.home], passed.of, lr, cuts, *behind
                back = self._submit(f"{self._label(i - 1)}-merge-bwd", tasks.merge_bwd, *args, worker=self.home)
                dxs = self._handed(self._merged_step(i - 1, back), i - 1)
            dys = dxs

    def _shards_backward(self, i: int, dys: dict[str, Sources], passed: Passed, lr: float) -> dict[str, Sources]:
        """The shards' parts of the gradient, by who needs them; the shards are the next step's from here on."""
        dxs: dict[str, Sources] = {}
        merged = i > 0 and i - 1 in passed.merged
        cuts = None if i == 0 else {self.home: (...,)} if merged else self._cuts(i - 1)
        for w, share in self.shares[i].items():
            away = len(self.shares[i]) - 1 if self.stages[i].by == "samples" else 0
            judge = i == self._last and self._by_all
            behind = [self.merged[i][w]] if judge and i in self._weighted else []
            args = self._part(i, share, away=away), dys[w], passed.of, lr, cuts, self.shards[i][w], *behind
            task = tasks.head_and_bwd if judge else tasks.shard_bwd
            result = self._submit(f"{self._label(i)}-bwd", task, *args, worker=w)
            self.shards[i][w] = result
            if behind:
                self.merged[i][w] = result
            if self.stages[i].reach and self._at[0] == self._at[1] - 1:
                self.edges[i][w] = self._edges_of(i, result, w, cuts or {})
            for worker in cuts or {}:
                dxs.setdefault(worker, []).append(result)
        if self.stages[i].by == "samples" and self._at[0] == self._at[1] - 1:
            self._owed[i] = lr
        return dxs

    def _step_owed(self) -> None:
        """Shards of samples make their step by the gradients of all, which else is part of the next way there."""
        for i, lr in self._owed.items():
            gradients = [*self.shards[i].values()]
            for w, share in self.shares[i].items():
                args = self._part(i, share), gradients, lr
                self.shards[i][w] = self._submit(f"{self._label(i)}-step", tasks.shard_step, *args, worker=w)
        self._owed = {}

    def _edges_of(self, i: int, result: Result, worker: str, cuts: Iterable[str]) -> Result:
        """Of a shard after its step: in its parcel where all that is in there is for whom they go to."""
        if edges_travel_along(self.shares[i], worker, [*cuts]):
            return result
        return self._submit("take-edges", tasks.take_edges, result, worker=worker)

    def _handed(self, result: Result, i: int) -> dict[str, Sources]:
        """Where each worker finds its part of the gradient of a stage's outputs."""
        return {w: [result] for w in self.shares[i]}

    def _merged_step(self, i: int, back: Result) -> Result:
        """The stage's merged layers have made their step behind `back`."""
        if i in self._weighted:
            self.merged[i][self.home] = back
        return back

    def _behind(self, i: int) -> Sources:
        """What a stage's merged layers have done last."""
        return [self.merged[i][self.home]] if i in self._weighted else []

    def _holders(self, i: int) -> list[str]:
        """Who has the weights of a stage's merged layers."""
        return self.judges if i == self._last else [self.home]

    # --- what the tasks are told ---

    def _part(self, i: int, share: Share | None = None, *, away: int = 0) -> Part:
        weighted = share is not None or i in self._weighted
        before = self.stages[i - 1].by if i else "kernels"
        by_all = i == self._last and self._by_all
        return Part(i, len(self.stages[i].names), share, away, weighted, self.stages[i].by, before, by_all)

    def _away(self, i: int, worker: str) -> int:
        """How many other workers a shard's output goes to."""
        ahead = i < self._last and self.stages[i].rest is None
        together = self.judges if i == self._last else [self.home]
        return len({*(self.shares[i + 1] if ahead else together)} - {worker})

    def _cuts(self, i: int) -> Cuts:
        """Of which part of a stage's outputs each worker needs the gradient; all that of the summed layer's."""
        if self.stages[i].summed is not None:
            return {ALL: (...,)}
        if self.stages[i].by == "kernels":
            return {worker: (..., share.graded) for worker, share in self.shares[i].items()}
        (sub, subs, samples), whole = self._at, slice(None)
        count = samples * (sub + 1) // subs - samples * sub // subs
        return {worker: (..., share.samples(count), whole) for worker, share in self.shares[i].items()}

    def _label(self, i: int) -> str:
        return self.stages[i].name or "input"

    def _submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str) -> Any:
        where = Where(self.context.name, worker, self.generation, self._step, self.context.job.cluster.wire, *self._at)
        submit = self._bundle.add if self._bundle else self.context.submit
        return submit(label, function, where, *args, worker=worker)
