"""What a group's workers do besides its steps: the meetings of the update rule, on behalf of all of them.

A group's *home* is the replica that the server knows. At a meeting its members hand in the weights of their pieces,
home puts them together, exchanges them as a worker by itself would, and hands out what is trained on from then. The
momentum stays with the pieces, but for a round's end, when home gets it for the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daskcnn.arrays import single_threaded_blas
from daskcnn.cluster.layers.messages import OutOfStep, Parcel
from daskcnn.cluster.layers.task_context import Part, Where, session_at, shelf_at, working
from daskcnn.cluster.layers.tasks import edges_of, take_counters
from daskcnn.cluster.protocol import RoundOrder
from daskcnn.cluster.session.served_round import ServedRound
from daskcnn.cluster.session.session import Counters, Session
from daskcnn.cluster.session.stopping import stopped
from daskcnn.cluster.session.tasks import join_run
from daskcnn.nn.score import Score
from daskcnn.sharded import By, Piece, Stage, cut_pieces, join_pieces, stages_of
from daskcnn.training.replica import Replica, Stopped, Trained
from daskcnn.training.reports import RoundReport

Handed = Mapping[tuple[str, int], Piece]
"""A member's pieces by their names on the shelf."""
Shards = Sequence[Sequence[Piece]]
"""Of each stage, in the order of its workers."""


@dataclass(frozen=True)
class Plan:
    """How the network lies on the group: of each stage how many layers are spread, and the kernels of its workers.

    by: what of each is divided. home: who has the layers that are not spread; judges: who has those of the last stage.
    """

    spread: tuple[int, ...]
    by: tuple[By, ...]
    kernels: tuple[Mapping[str, int], ...]
    home: str
    judges: tuple[str, ...]

    def holders(self, i: int) -> tuple[str, ...]:
        """Who has the weights of a stage's merged layers."""
        return self.judges if i == len(self.kernels) - 1 else (self.home,)

    def stages(self, replica: Replica) -> list[Stage]:
        stages = zip(stages_of(replica.model), self.spread, self.by, strict=True)
        return [replace(stage.spread_to(n), by=by) for stage, n, by in stages]


@dataclass(frozen=True)
class Meeting:
    """Which meeting: of whose round, and whether it is the round's last.

    score: of the round's steps before those whose scores come with their tasks. lr: of the last step.
    """

    order: RoundOrder
    last: bool
    score: Score
    lr: float


@dataclass(frozen=True)
class GroupReport:
    """How the round went for the whole group, and what each member did."""

    report: RoundReport
    members: Mapping[str, Counters]


@dataclass
class AtHome:
    """A round as the group's home has it. met: the step of its last meeting."""

    served: ServedRound
    met: int = -1


# --- at home ---


def join_group(where: Where, plan: Plan, order: RoundOrder) -> None:
    """Join the server for the group; center and momentum are there to be handed out. Raises Stopped."""
    if not join_run(order):
        raise Stopped
    session = session_at(where)
    session.kept.drop(AtHome)
    _lay_out(where, plan, session.replica, momentum=True)


def hand_out(where: Where, member: str, momentum: bool, behind: None) -> Handed:
    """What this member goes on with."""
    pieces: Handed = shelf_at(where).take(("handed", member), where.step)
    handed = pieces if momentum else {name: _still(piece) for name, piece in pieces.items()}
    away = member != where.worker
    session_at(where).counters.bytes_up += sum(piece.nbytes for piece in handed.values()) if away else 0
    return handed


def meet(
    where: Where, plan: Plan, meeting: Meeting, scores: Sequence[Score], shards: Shards, merged: Sequence[Piece | None]
) -> None:
    """Exchange with the server what the members have handed in, and lay out what they get for it.

    Raises Stopped where the driver gives the round up, OutOfStep where this meeting has been.
    """
    session = session_at(where)
    home = _home(session, meeting.order)
    if home.met >= where.step:
        raise OutOfStep(f"step {where.step}: the group has met already; a task was run twice")
    home.met = where.step
    with single_threaded_blas():
        _put_together(session.replica, plan, shards, merged, momentum=meeting.last)
        home.served.trained(Trained(sum(scores, meeting.score), meeting.lr, 0.0, 0.0))
    _lay_out(where, plan, session.replica, momentum=False)


def end_round(where: Where, order: RoundOrder, members: Sequence[str], counters: Sequence[Counters]) -> GroupReport:
    """Judge the center if the order says so, and report. counters: of the members."""
    home = _home(session_at(where), order)
    with single_threaded_blas():
        report = home.served.end()
    return GroupReport(report, dict(zip(members, counters, strict=True)))


def _home(session: Session, order: RoundOrder) -> AtHome:
    """The present round's, begun with its first meeting."""
    home = session.kept.find(AtHome)
    if home is None or home.served.asked != order:
        home = session.kept.put(AtHome(ServedRound(order, session, stopped)))
    return home


def _put_together(
    replica: Replica, plan: Plan, shards: Shards, merged: Sequence[Piece | None], *, momentum: bool
) -> None:
    """Make the home's replica what its group has come to."""
    whole = [[_moving(piece) for piece in own] for own in shards]
    others = [piece and _moving(piece) for piece in merged]
    weights, velocity = join_pieces(plan.stages(replica), replica.layout, whole, others)
    replica.adopt(weights)
    if momentum:
        replica.adopt_velocity(velocity)


def _lay_out(where: Where, plan: Plan, replica: Replica, *, momentum: bool) -> None:
    """Cut the home's weights into the members' pieces, which `hand_out` takes from the shelf."""
    velocity = replica.host_velocity() if momentum else np.zeros(replica.layout.parameter_size, replica.layout.dtype)
    kernels = [list(own.values()) for own in plan.kernels]
    shards, merged = cut_pieces(plan.stages(replica), replica.layout, replica.host_weights(), velocity, kernels)
    handed: dict[str, dict[tuple[str, int], Piece]] = {plan.home: {}}
    for i, (own, pieces, rest) in enumerate(zip(plan.kernels, shards, merged, strict=True)):
        for member, piece in zip(own, pieces, strict=True):
            handed.setdefault(member, {})["shard", i] = piece
        if rest is not None:
            for member in plan.holders(i):
                handed.setdefault(member, {})["merged", i] = rest
    shelf = shelf_at(where)
    for member, parts in handed.items():
        shelf.put(("handed", member), where.step, parts)


# --- at every member ---


def hand_in(where: Where, part: Part, momentum: bool, away: bool, *behind: object) -> Piece:
    """The piece that the steps before have left, on the host. away: home is another worker."""
    with working(where) as replica:
        piece: Piece = shelf_at(where).get(part.piece, where.step)
        piece = (piece if momentum else _still(piece)).on_host(part.device(replica))
    session_at(where).counters.bytes_up += piece.nbytes if away else 0
    return piece


def adopt(where: Where, part: Part, momentum: bool, away: bool, handed: Handed) -> Parcel:
    """Go on from a piece that was handed out, with its momentum or with the momentum that is here; a shard's edges."""
    shelf, given = shelf_at(where), handed[part.piece]
    session_at(where).counters.bytes_down += given.nbytes if away else 0
    with working(where) as replica:
        piece = given.on(part.device(replica))
        if not momentum:
            piece = replace(piece, velocity=shelf.get(part.piece, where.step).velocity)
        shelf.put(part.piece, where.step, piece)
        return Parcel(where.worker, {}, edges_of(replica, part, piece))


def stay(where: Where, part: Part) -> Parcel:
    """The piece as it is: steps that follow hang on this task, and no longer on all those before it."""
    piece: Piece = shelf_at(where).get(part.piece, where.step)
    return Parcel(where.worker, {}, edges_of(session_at(where).replica, part, piece))


def settled(where: Where, *behind: object) -> None:
    """Nothing is under way here."""


def counted(where: Where, *behind: object) -> Counters:
    """What this member spent and moved since it was last asked."""
    return take_counters(where)


def _still(piece: Piece) -> Piece:
    """Without its momentum, which is long."""
    return replace(piece, velocity=piece.velocity[:0])


def _moving(piece: Piece) -> Piece:
    """With some momentum, where it came without."""
    missing = piece.layout.parameter_size - piece.velocity.size
    return replace(piece, velocity=np.zeros(missing, piece.layout.dtype)) if missing else piece
