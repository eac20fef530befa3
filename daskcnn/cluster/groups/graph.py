"""A group's tasks: sharded steps over its members, and between them the meetings of the update rule.

All of it hangs together: a meeting on the pieces that the steps before it leave, the steps after it on what is handed
out. So the driver submits steps and meetings ahead, and home waits for the server where a rule has a barrier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from distributed import Future

from daskcnn.cluster.groups import tasks
from daskcnn.cluster.groups.tasks import GroupMeeting, SharedNetwork
from daskcnn.cluster.layers.graph import LayerGraph, MinibatchStep, Result
from daskcnn.cluster.layers.task_context import Minibatch, StagePart
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.context import RunContext
from daskcnn.job.network import pace_at, rate_of
from daskcnn.job.tables import Job
from daskcnn.nn import Layout
from daskcnn.partition.rounds import Round
from daskcnn.sharded import Carried, Stage
from daskcnn.store import BatchPlan
from daskcnn.store.loader import batch_edges
from daskcnn.training.replica import presentations


@dataclass(frozen=True)
class RoundStep(MinibatchStep):
    """A step of a group's round. plan: of the pass that it is part of; begin: where in its order the minibatch begins.

    meets: whether the group exchanges weights behind it. last: of the round.
    """

    plan: BatchPlan
    begin: int
    meets: bool
    last: bool


def round_steps(
    job: Job, round_: Round, *, passes: int, scale: float, exchanges: Collection[int]
) -> Iterator[RoundStep]:
    """The steps that one replica by itself would make of this round, in its order and at its learning rates.

    Parameters
    ----------
    passes : passes over its samples that the rule makes in a round.
    scale : factor of the learning rate.
    exchanges : the steps, counted from 1, after which weights are exchanged.
    """
    rate, done, (begun, end) = rate_of(job.train.schedule), 0, round_.progress
    first, number = round_.number * passes, 0
    for plan in presentations(job, round_.ranges, round_.samples, first, round_.steps):
        for position, (lo, hi) in enumerate(batch_edges(plan, plan.limit or 0)):
            progress = begun + (end - begun) * done / round_.samples
            pace = pace_at(job.train, rate, progress, scale)
            done += hi - lo
            last, meets = done == round_.samples, number + 1 in exchanges
            yield RoundStep(number, plan.presentation, position, pace, hi - lo, plan, lo, meets, last)
            number += 1


class GroupGraph(LayerGraph):
    """The tasks of one group of workers, which are those of the context. chained: steps since the last task that hangs
    on none before it.
    """

    def __init__(self, context: RunContext, stages: Sequence[Stage], layout: Layout) -> None:
        super().__init__(context, stages, layout)
        self.shared = SharedNetwork.of(self.plan)
        self.chained = 0

    # --- between steps ---

    def join(self, order: RoundOrder, generation: int) -> Future:
        """Join the server for the group and give every member its pieces; ends when all of them have theirs.

        generation: higher than all that these workers have seen in the run.
        """
        self.generation, self._step, self._owed = generation, 0, {}
        self._begin()
        joined = self._submit("join", tasks.join_group, self.shared, order, worker=self.home)
        self._hand_out(joined, optimizer=True)
        return self._submitted(self._settled())

    def meet(self, meeting: GroupMeeting, scores: Sequence[Future]) -> Future:
        """Submit a meeting behind the steps so far. scores: of those that `meeting` does not count yet."""
        self._begin()
        optimizer = meeting.last
        handed = {piece: self._hand_in(piece, optimizer) for piece in self._distinct_pieces()}
        shards = [[handed[Carried("shard", i, worker)] for worker in own] for i, own in enumerate(self.kernels)]
        merged = [handed.get(Carried("merged", i, self.home)) for i in range(len(self.stages))]
        args = self.shared, meeting, list(scores), shards, merged
        met = self._submit("meet", tasks.meet, *args, worker=self.home)
        self._hand_out(met, optimizer=False)
        return self._submitted(met)

    def end(self, order: RoundOrder) -> Future:
        """The group's report, once the last meeting's weights are where they belong."""
        self._begin()
        counted = [self._submit("counters", tasks.counted, *self._last_of(w), worker=w) for w in self.workers]
        args = order, tuple(self.workers), counted
        return self._submitted(self._submit("report", tasks.end_round, *args, worker=self.home))

    def settle(self) -> Future:
        """Ends when nothing is under way any more."""
        self._begin()
        return self._submitted(self._settled())

    def cut_chain(self) -> None:
        """Steps that follow hang on new tasks, as the scheduler keeps all that a task hangs on. Once settled."""
        self._begin()
        self.chained = 0
        self._hold(lambda part, worker: self._submit("stay", tasks.stay, part, worker=worker))
        self._submitted(next(iter(self.held.values())))

    def submit(self, step: MinibatchStep) -> Future:
        """Submit a step behind what was submitted before. Returns the future of its score."""
        self.chained += 1
        return super().submit(step)

    # --- parts of those ---

    def _begin(self) -> None:
        """Bundle what is submitted from here on, first the steps still owed."""
        self._open()
        self._step_owed()

    def _minibatch(self, step: MinibatchStep) -> Minibatch:
        assert isinstance(step, RoundStep), "a group trains in rounds"
        return Minibatch(step.plan, step.begin, step.begin + step.samples)

    def _hand_in(self, piece: Carried, optimizer: bool) -> Result:
        args = self._part_of(piece), optimizer, piece.worker != self.home, self.held[piece]
        return self._submit("hand-in", tasks.hand_in, *args, worker=piece.worker)

    def _hand_out(self, behind: Result, *, optimizer: bool) -> None:
        """Every member goes on from what home has laid out for it behind this task."""
        handed = {
            w: self._submit("hand-out", tasks.hand_out, w, optimizer, behind, worker=self.home) for w in self.workers
        }

        def adopted(part: StagePart, worker: str) -> Result:
            args = part, optimizer, worker != self.home, handed[worker]
            return self._submit("adopt", tasks.adopt, *args, worker=worker)

        self._hold(adopted)

    def _settled(self) -> Result:
        each = [self._submit("settle", tasks.settled, *self._last_of(w), worker=w) for w in self.workers]
        return self._submit("settle", tasks.settled, each, worker=self.home)

    def _last_of(self, worker: str) -> list[Result]:
        """The worker's last task with each of its pieces."""
        return [ref for piece, ref in self.held.items() if piece.worker == worker and piece.what != "edges"]
