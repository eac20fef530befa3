"""A layer-sharded step on the cluster: the tasks of its plan (`sharded.step_plan`), submitted to Dask.

Shards are results of the step before and stay on their workers. Outputs of a stage go straight to all workers of the
next one, and their gradients straight back to their makers. Only layers that need all channels are at *home*, the
fastest worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

from dask.task_spec import Alias
from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.layers import step_tasks
from daskcnn.cluster.layers.measurements import balance_of, fastest
from daskcnn.cluster.layers.task_context import Minibatch, StagePart, TaskContext, batch_plan
from daskcnn.cluster.run.context import Bundle, RunContext
from daskcnn.nn import Layout, OptimizerState, StepPace
from daskcnn.sharded.balance import ShareSearch
from daskcnn.sharded.pieces import cut_pieces, join_pieces, weighted_stages
from daskcnn.sharded.plan_parts import Carried, PlannedTask, TaskKind
from daskcnn.sharded.stages import Share, Stage
from daskcnn.sharded.step_plan import StepPlan

Result: TypeAlias = Future | Alias
"""The result of a task that is submitted, or that is about to be."""
FUNCTIONS: Mapping[TaskKind, Callable[..., Any]] = {
    TaskKind.FORWARD: step_tasks.shard_fwd,
    TaskKind.MERGE_FORWARD: step_tasks.merge_fwd,
    TaskKind.HEAD: step_tasks.head,
    TaskKind.LOSS_AND_BACKWARD: step_tasks.head_and_bwd,
    TaskKind.BACKWARD: step_tasks.shard_bwd,
    TaskKind.MERGE_BACKWARD: step_tasks.merge_bwd,
    TaskKind.TAKE_EDGES: step_tasks.take_edges,
    TaskKind.SCORE: step_tasks.take_score,
}
"""The function of each kind of a plan's tasks."""


@dataclass(frozen=True)
class MinibatchStep:
    """A step of one minibatch: its number in the run, the pass over the samples, and its position in this pass."""

    number: int
    presentation: int
    position: int
    pace: StepPace
    samples: int


class LayerGraph:
    """The network's pieces on the workers that are alive, and the tasks of one step after the other.

    Attributes
    ----------
    plan : A step of a whole minibatch.
    held : Pieces and edges of each worker after the steps so far.
    """

    def __init__(
        self, context: RunContext, stages: Sequence[Stage], layout: Layout, *, balance: ShareSearch | None = None
    ) -> None:
        self.context, self.layout = context, layout
        self.balance = balance or balance_of(context, stages, fastest(context))
        self.home = self.balance.home
        self.kernels = self.balance.kernels()
        plan = self.balance.plan(self.kernels)
        self.plan = replace(plan, weighted=weighted_stages(plan.stages, layout))
        self.stages = self.plan.stages
        busy = {self.home, *chain(*self.kernels)}
        self.workers = [worker for worker in context.workers.alive if worker in busy]
        self.held: dict[Carried, Any] = {}
        self.generation = self._step = 0
        self._owed: dict[int, StepPace] = {}  # by stage whose samples are divided: the pace of a step not yet made
        self._plans: dict[tuple[int, bool], StepPlan] = {}
        # while a bundle is open: its tasks, and what was held before
        self._bundle: Bundle | None = None
        self._before: dict[Carried, Any] = {}

    # --- the pieces ---

    def place(self, weights: Array, optimizer: OptimizerState, step: int) -> None:
        """Send every piece of these weights (size,) and optimizer's state to where this step will use it."""
        counts = [list(own.values()) for own in self.kernels]
        shards, merged = cut_pieces(self.stages, self.layout, weights, optimizer, counts)
        self.generation += 1
        self._step, self._owed = step, {}

        def installed(part: StagePart, worker: str) -> Future:
            i, share = part.stage, part.share
            piece = merged[i] if share is None else shards[i][list(self.kernels[i]).index(worker)]
            assert piece is not None, "only stages with weights have merged pieces"
            sent = self.context.dispatch.send(piece, worker)
            return self._submit(f"{self.stages[i].label}-weights", step_tasks.install, part, sent, worker=worker)

        self._hold(installed)

    def _hold(self, task: Callable[[StagePart, str], Result]) -> None:
        """Let the steps that follow begin behind these tasks, one for every piece of a worker."""
        self.held = {piece: task(self._part_of(piece), piece.worker) for piece in self._pieces()}
        self.held |= {piece._replace(what="edges"): ref for piece, ref in self.held.items() if piece.what == "shard"}

    def _pieces(self) -> list[Carried]:
        """Return all pieces of weights under the names that a step finds them by."""
        shards = [Carried("shard", i, worker) for i, own in enumerate(self.kernels) for worker in own]
        merged = [Carried("merged", i, worker) for i in sorted(self.plan.weighted) for worker in self.plan.holders(i)]
        return [*shards, *merged]

    def _distinct_pieces(self) -> list[Carried]:
        """Return the pieces that make up the network: merged ones are alike on all of their workers."""
        return [piece for piece in self._pieces() if piece.what == "shard" or piece.worker == self.home]

    def pieces(self) -> dict[Carried, Future]:
        """Return all pieces after the steps submitted so far, on their way to the driver."""
        self._step_owed()
        own = {piece: (self._part_of(piece), self.held[piece]) for piece in self._distinct_pieces()}
        return {p: self._submit("collect", step_tasks.collect, *args, worker=p.worker) for p, args in own.items()}

    def joined(self, found: Mapping[Carried, Any]) -> tuple[Array, OptimizerState]:
        """Return weights and optimizer's state of these pieces."""
        return join_pieces(self.stages, self.layout, *self._by_stage(found))

    def _by_stage(self, found: Mapping[Carried, Any]) -> tuple[list[list[Any]], list[Any]]:
        """Return the shards of each stage in the order of their workers, and the merged piece of each stage or None."""
        shards = [[found[Carried("shard", i, worker)] for worker in own] for i, own in enumerate(self.kernels)]
        return shards, [found.get(Carried("merged", i, self.home)) for i in range(len(self.stages))]

    def counters(self, worker: str) -> Future:
        """Return the counters of this worker since it was last asked."""
        return self._submit("counters", step_tasks.take_counters, worker=worker)

    # --- a step ---

    def submit(self, step: MinibatchStep) -> Future:
        """Submit a step behind those before it, all of its tasks at once. Returns the future of its score."""
        self._open()
        plan, minibatch, made = self.plan_of(step.samples), self._minibatch(step), list[Result]()
        for task in plan.tasks:
            about = {"minibatch": minibatch, "pace": step.pace, "sub": task.part, "subs": plan.parts}
            args = self._arguments(task, made)
            made.append(self._submit(task.label, FUNCTIONS[task.kind], *args, worker=task.worker, **about))
        self.held |= {what: made[number] for what, number in plan.carried.items()}
        self._owed = {i: step.pace for i, stage in enumerate(self.stages) if stage.by == "samples"}
        score = self._submitted(made[-1])
        self._step += 1
        return score

    def plan_of(self, samples: int) -> StepPlan:
        """Return the plan of the next step, for a minibatch of this size."""
        placed = not self._owed
        if (samples, placed) not in self._plans:
            parts = min(self.context.job.train.sub_batches, samples)
            self._plans[samples, placed] = replace(self.plan, parts=parts, samples=samples, placed=placed)
        return self._plans[samples, placed]

    def _arguments(self, task: PlannedTask, made: Sequence[Result]) -> list[Any]:
        """Return a task's arguments, with the results of others that it is given."""

        def given(*what: Any) -> list[Result]:
            sources = [each.source for each in task.given(*what)]
            return [made[source] if isinstance(source, int) else self._before[source] for source in sources]

        behind = given(None)
        if task.kind in (TaskKind.TAKE_EDGES, TaskKind.SCORE):
            return behind
        places = tuple(each.place for each in task.given("gradients", "merged gradients"))
        part = self._stage_part(task.stage, task.share)
        part = replace(part, away=task.away, taken=task.taken, places=places, cuts=task.cuts)
        args = [part, given("outputs", "merged outputs", "gradients", "merged gradients")]
        if task.kind == TaskKind.FORWARD:
            args += [given("edges"), tuple(each.edge for each in task.given("edges"))]
            args += [given("weight gradients"), self._owed.get(task.stage, StepPace(0.0))]
        return [*args, *behind]

    def _open(self) -> None:
        """Bundle the tasks that follow. Pieces and edges are kept as they are now until the bundle is submitted."""
        self._bundle, self._before = self.context.dispatch.bundle(), dict(self.held)

    def _submitted(self, wanted: Any) -> Future:
        """Submit the bundle. Returns the future of one result; those of the next step's inputs become `held`."""
        assert self._bundle is not None, "begun with what is sent"
        futures = self._bundle.submit([wanted, *(ref for ref in self.held.values() if isinstance(ref, Alias))])
        self.held = {what: futures.get(ref.key, ref) for what, ref in self.held.items()}
        self._bundle, self._before = None, {}
        return futures[wanted.key]

    def _minibatch(self, step: MinibatchStep) -> Minibatch:
        job, begin = self.context.job, step.position * self.context.job.train.batch_size
        return Minibatch(batch_plan(job, self.context.samples, step.presentation), begin, begin + step.samples)

    def _step_owed(self) -> None:
        """Let shards of samples make the step that else the next forward pass would begin with."""
        for i, pace in self._owed.items():
            gradients = [self.held[Carried("shard", i, worker)] for worker in self.kernels[i]]
            for worker, share in self.plan.shares[i].items():
                args = f"{self.stages[i].name}-step", step_tasks.shard_step, self._stage_part(i, share), gradients, pace
                self.held[Carried("shard", i, worker)] = self._submit(*args, worker=worker)
        self._owed = {}

    # --- instructions of the tasks ---

    def _part_of(self, piece: Carried) -> StagePart:
        share = self.plan.shares[piece.stage][piece.worker] if piece.what == "shard" else None
        return self._stage_part(piece.stage, share)

    def _stage_part(self, i: int, share: Share | None) -> StagePart:
        plan, stage = self.plan, self.stages[i]
        weighted = share is not None or i in plan.weighted
        widths = tuple(plan.widths[source] for source in stage.consumed)
        by_all = i == plan.last and plan.judged_by_all
        return StagePart(i, len(stage.names), share, weighted=weighted, by=stage.by, by_all=by_all, widths=widths)

    def _submit(self, label: str, function: Callable[..., Any], *args: Any, worker: str, **about: Any) -> Any:
        """Submit a task, to the bundle if one is open. about: what its context has of a step."""
        wire = self.context.job.cluster.maps
        context = TaskContext(self.context.name, worker, self.generation, self._step, wire, **about)
        submit = self._bundle.add if self._bundle else self.context.dispatch.submit
        return submit(label, function, context, *args, worker=worker)
