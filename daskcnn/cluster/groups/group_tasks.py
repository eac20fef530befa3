"""Tasks of a group's workers besides its steps: a group's meetings with the server.

The server knows a group by its *home*. At a meeting the members hand in the weights of their pieces. Home joins them,
exchanges them as a worker by itself would, and hands out pieces of the new weights. The optimizer's state stays with
the pieces; only at a round's end home gets it, for the report.

A round may end early. Home is asked beside its tasks, so that it waits for no answer of the server any more, and leaves
with its next push. The driver adds a last meeting behind the steps that it has submitted. Those of them behind the push
that home has left with count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daskcnn.arrays import single_threaded_blas
from daskcnn.cluster.layers.step_tasks import edges_of, install
from daskcnn.cluster.layers.task_context import OutOfStep, StagePart, TaskContext, TaskResult, working
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.worker.farewell import RoundKey
from daskcnn.cluster.worker.session import Counters, Session, stop_signal, stopped
from daskcnn.cluster.worker.tasks import ServedRound, join_server
from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.pieces import Piece, cut_pieces, join_pieces
from daskcnn.sharded.stages import By, Stage
from daskcnn.sharded.step_plan import StepPlan
from daskcnn.training.replica import Replica, Trained
from daskcnn.training.round_report import RoundReport

Handed = Mapping[tuple[str, int], Piece]
"""A member's pieces by their names on the shelf."""
Shards = Sequence[Sequence[Piece]]
"""The shards of each stage, in the order of its workers."""


@dataclass(frozen=True)
class SharedNetwork:
    """The cut of the network by which home makes its group's pieces, and joins them.

    Attributes
    ----------
    spread, by : Of each stage: how many of its layers are divided, and by what.
    kernels : Of each stage, how many each worker has.
    judges : Workers that have the merged layers of the last stage; home has those of the others.
    """

    spread: tuple[int, ...]
    by: tuple[By, ...]
    kernels: tuple[Mapping[str, int], ...]
    home: str
    judges: tuple[str, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> SharedNetwork:
        """Take them from a plan of the group's steps."""
        spread, by = (tuple(each) for each in zip(*((len(s.names), s.by) for s in plan.stages), strict=True))
        return cls(spread, by, tuple(plan.kernels), plan.home, tuple(plan.judges))

    def stages(self, replica: Replica) -> list[Stage]:
        """Return the stages of the replica's network, divided like the group's."""
        stages = zip(stages_of(replica.model), self.spread, self.by, strict=True)
        return [replace(stage.spread_to(n), by=by) for stage, n, by in stages]


@dataclass(frozen=True)
class CutShort:
    """The end of a round behind this step, counted from 1. seconds: that home alone would take for a sample."""

    step: int
    seconds: float


@dataclass(frozen=True)
class GroupMeeting:
    """A meeting of a group's round.

    score: of the steps before those whose scores come with their tasks. early: the round ends with it before its time.
    """

    order: RoundOrder
    last: bool
    score: Score
    lr: float
    early: CutShort | None = None


@dataclass
class AtHome:
    """A round as the group's home has it, and the step of its last meeting; True: with which it ended early."""

    served: ServedRound
    met: tuple[int, bool] = (-1, False)


# --- at home ---


def join_group(context: TaskContext, shared: SharedNetwork, order: RoundOrder) -> None:
    """Join the server for the group, and lay out its center and the optimizer's state. Raises Stopped."""
    session = context.session
    join_server(order, session, stop_signal())
    session.kept.drop(AtHome)
    _lay_out(context, shared, session.replica, optimizer=True)


def hand_out(context: TaskContext, member: str, optimizer: bool, behind: None) -> Handed:
    """Return the pieces that this member goes on with."""
    pieces: Handed = context.shelf.take(("handed", member), context.step)
    handed = pieces if optimizer else {name: _still(piece) for name, piece in pieces.items()}
    if member != context.worker:
        context.session.counters.bytes_up += sum(piece.nbytes for piece in handed.values())
    return handed


def meet(
    context: TaskContext,
    shared: SharedNetwork,
    meeting: GroupMeeting,
    scores: Sequence[Score],
    shards: Shards,
    merged: Sequence[Piece | None],
) -> None:
    """Exchange with the server what the members have handed in, and lay out what they get for it.

    Raises Stopped where the driver gives the round up, and OutOfStep where the group has had this meeting.
    """
    home, replica = _home(context.session, meeting.order), context.session.replica
    number = context.step, meeting.early is not None
    if home.met >= number:
        raise OutOfStep(f"step {context.step}: the group has met already; a task was run twice")
    home.met = number
    with single_threaded_blas():
        weights, state = join_pieces(shared.stages(replica), replica.layout, shards, merged)
        replica.adopt(weights)
        if meeting.last:
            replica.adopt_optimizer(state)
        if home.served.goes_on:
            _exchange(context.session, home.served, meeting, sum(scores, meeting.score))
    _lay_out(context, shared, replica, optimizer=False)


def end_round(
    context: TaskContext, order: RoundOrder, members: Sequence[str], counters: Sequence[Counters]
) -> tuple[RoundReport, dict[str, Counters]]:
    """Judge the center if the order says so. Returns the whole group's report, and the counters of each member."""
    with single_threaded_blas():
        report = _home(context.session, order).served.end()
    context.session.farewell.end(None)
    return report, dict(zip(members, counters, strict=True))


def _home(session: Session, order: RoundOrder) -> AtHome:
    """Return the present round. Its first meeting begins it."""
    home = session.kept.find(AtHome)
    if home is None or home.served.asked != order:
        home = session.kept.put(AtHome(ServedRound(order, session, stopped)))
        session.farewell.begin(_key(order))
    return home


def _key(order: RoundOrder) -> RoundKey:
    assert order.round is not None, "the order of a round"
    return order.life, order.session, order.round.number


def _exchange(session: Session, served: ServedRound, meeting: GroupMeeting, score: Score) -> None:
    if meeting.early is None:
        served.trained(Trained(score, meeting.lr, 0.0, 0.0))
    else:
        session.farewell.ask(_key(meeting.order))
        alone = meeting.early.seconds * score.samples  # home judges its weights alone
        served.leave(meeting.early.step, Trained(score, meeting.lr, 0.0, alone))


def _lay_out(context: TaskContext, shared: SharedNetwork, replica: Replica, *, optimizer: bool) -> None:
    """Cut the home's weights into the members' pieces, which `hand_out` takes from the shelf."""
    without = OptimizerState(np.empty((0, replica.layout.parameter_size), replica.layout.dtype))
    state = replica.host_optimizer() if optimizer else without
    kernels = [list(own.values()) for own in shared.kernels]
    shards, merged = cut_pieces(shared.stages(replica), replica.layout, replica.host_weights(), state, kernels)
    handed: dict[str, dict[tuple[str, int], Piece]] = {shared.home: {}}
    for i, (own, pieces, rest) in enumerate(zip(shared.kernels, shards, merged, strict=True)):
        for member, piece in zip(own, pieces, strict=True):
            handed.setdefault(member, {})["shard", i] = piece
        if rest is not None:
            for member in shared.judges if i == len(merged) - 1 else (shared.home,):
                handed.setdefault(member, {})["merged", i] = rest
    shelf = context.shelf
    for member, parts in handed.items():
        shelf.put(("handed", member), context.step, parts)


# --- at every member ---


def hand_in(context: TaskContext, part: StagePart, optimizer: bool, away: bool, *behind: object) -> Piece:
    """Return the piece that the steps before have left, on the host. away: home is another worker."""
    with working(context) as replica:
        piece: Piece = context.shelf.get(part.piece, context.step)
        piece = (piece if optimizer else _still(piece)).on_host(part.device(replica))
    context.session.counters.bytes_up += piece.nbytes if away else 0
    return piece


def adopt(context: TaskContext, part: StagePart, optimizer: bool, away: bool, handed: Handed) -> TaskResult:
    """Go on from a piece that was handed out, without `optimizer` with the own state. Returns the edges of a shard."""
    piece = handed[part.piece]
    context.session.counters.bytes_down += piece.nbytes if away else 0
    own = None if optimizer else context.shelf.get(part.piece, context.step).optimizer
    return install(context, part, piece, own)


def stay(context: TaskContext, part: StagePart) -> TaskResult:
    """Keep the piece. Steps that follow hang on this task, and no longer on all those before it."""
    piece: Piece = context.shelf.get(part.piece, context.step)
    return TaskResult(context.worker, {}, edges_of(context.session.replica, part, piece))


def settled(context: TaskContext, *behind: object) -> None:
    """Do nothing: the tasks before it have ended."""


def _still(piece: Piece) -> Piece:
    """Return the piece without its optimizer's vectors, which are long."""
    return replace(piece, optimizer=piece.optimizer.without_vectors)
