"""Parts of a step's plan: kinds and groups of tasks, flows between groups, single tasks, their inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import EllipsisType
from typing import Literal, NamedTuple, TypeAlias

from daskcnn.sharded.stages import By, Share, Side, Stage

Kernels: TypeAlias = Sequence[Mapping[str, int]]
"""How many kernels of each stage each worker has; workers that have none are left out."""
What: TypeAlias = Literal["outputs", "merged outputs", "gradients", "merged gradients", "edges", "weight gradients"]
"""What travels: of the last two, numbers a step, of the others numbers a sample."""
Cut: TypeAlias = tuple[EllipsisType | slice, ...]
"""Part of an array (…, N, C)."""
Cuts: TypeAlias = Mapping[str, Cut]
"""Which part of a result goes to which worker."""
ALL = ""
"""In place of a worker's name: every worker that needs any of a result gets this part."""
WHOLE: Cut = (...,)


class TaskKind(Enum):
    """Kinds of tasks. The value is the task's name, or is added to the name of its stage."""

    FORWARD = "-fwd"
    MERGE_FORWARD = "-merge-fwd"
    HEAD = "head"
    LOSS_AND_BACKWARD = "-bwd", "the loss first"
    BACKWARD = "-bwd"
    MERGE_BACKWARD = "-merge-bwd"
    TAKE_EDGES = "take-edges"
    SCORE = "score"

    def label(self, stage: Stage) -> str:
        """The task's name on the dashboard: conv1-fwd."""
        name = self.value if isinstance(self.value, str) else self.value[0]
        return f"{stage.label}{name}" if name.startswith("-") else name


class WorkerTraffic(NamedTuple):
    """Numbers, or bytes, that a worker sends and receives."""

    up: int
    down: int


class Flow(NamedTuple):
    """Messages from tasks of one group to those of another: each sender has one for every receiver but itself.

    Attributes
    ----------
    stage
        Number of the stage whose outputs, gradients of outputs or gradients of weights these are.
    sizes
        Numbers of one message, by its sender; where `by_receiver`, by its receiver.
    pairs
        Messages besides: of workers that only add some of the channels, by sender and receiver, in order.
    """

    stage: int
    what: What
    senders: Collection[str]
    receivers: Collection[str]
    sizes: Mapping[str, int]
    by_receiver: bool = False
    pairs: Mapping[tuple[str, str], int] = {}

    def numbers(self, sender: str, receiver: str) -> int:
        """Numbers of this message; 0 where it stays on its worker."""
        if sender == receiver:
            return 0
        if (sender, receiver) in self.pairs:
            return self.pairs[sender, receiver]
        return self.sizes[receiver if self.by_receiver else sender]

    def senders_to(self, receiver: str) -> list[str]:
        """Workers that have a message for this one, itself among them if it has."""
        whole = self.senders if receiver in self.receivers else ()
        return [*whole, *(sender for sender, other in self.pairs if other == receiver)]

    @property
    def moved(self) -> dict[str, WorkerTraffic]:
        """Messages that each worker sends and receives; workers that do neither are left out."""
        if self.by_receiver:
            sizes = {w: size for w, size in self.sizes.items() if w in self.receivers}
            moved = {w: WorkerTraffic(up, down) for w, down, up in _spread_out(sizes, self.senders)}
        else:
            sizes = {w: size for w, size in self.sizes.items() if w in self.senders}
            moved = {w: WorkerTraffic(up, down) for w, up, down in _spread_out(sizes, self.receivers)}
        for (sender, receiver), size in self.pairs.items():
            if sender != receiver and size:
                up, down = moved.get(sender, NOTHING)
                moved[sender] = WorkerTraffic(up + size, down)
                up, down = moved.get(receiver, NOTHING)
                moved[receiver] = WorkerTraffic(up, down + size)
        return moved


NOTHING = WorkerTraffic(0, 0)


def _spread_out(sizes: Mapping[str, int], others: Collection[str]) -> Iterator[tuple[str, int, int]]:
    """Numbers that each worker gives and takes, if everything in `sizes` goes from its worker to each of the others."""
    total, count = sum(sizes.values()), len(others)
    for w, own in sizes.items():
        there = w in others
        gives, takes = own * (count - there), total - own if there else 0
        if gives or takes:
            yield w, gives, takes
    if total:
        yield from ((w, 0, total) for w in others if w not in sizes)


class Arrival(NamedTuple):
    """What a group of tasks is given by another one, by that group's number in the plan."""

    flow: Flow
    source: int


class TaskGroup(NamedTuple):
    """Tasks of one kind and stage, one a worker, for each part of a minibatch.

    Attributes
    ----------
    inputs
        What they are given by other groups; besides they have what lies on their workers.
    source
        Number of the group of whose results they are made; None: of none but `inputs`.
    once
        Whether they run only once a step, behind the minibatch's last part.
    """

    kind: TaskKind
    stage: int
    workers: Collection[str]
    inputs: Sequence[Arrival] = ()
    source: int | None = None
    once: bool = False


class WantedEdge(NamedTuple):
    """Channels at one end of a neighbour's shard that a worker computes with besides its own."""

    neighbour: str
    side: Side
    channels: int


class Carried(NamedTuple):
    """A value that one step leaves for the next: weights on a worker, or edges of its shard."""

    what: Literal["shard", "merged", "edges"]
    stage: int
    worker: str


@dataclass(frozen=True, slots=True)
class TaskInput:
    """A result that a task is given.

    Attributes
    ----------
    source
        Number of the task that makes it, or what the step before has left.
    sender
        Worker that has it.
    what
        What of it the task uses; None: the task only waits for it.
    cut
        Which part of the sender's array travels.
    place
        Where the channels that it brings lie among those that the task asks for; None: they are all of them.
    edge
        Of a neighbour's edges: which.
    nbytes
        Bytes that travel; 0 where the sender is the task's own worker.
    """

    source: int | Carried
    sender: str
    what: What | None = None
    cut: Cut = WHOLE
    place: slice | None = None
    edge: WantedEdge | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """Outputs of a stage that a task works on.

    Attributes
    ----------
    stage
        Whose.
    count
        How many of the task's inputs bring them; 0: they lie on its worker, which was sent them before.
    start
        Number of the first channel that they bring.
    kept
        Whether other tasks of its worker need them as well.
    by
        What they come divided by.
    """

    stage: int
    count: int
    start: int = 0
    kept: bool = False
    by: By = "kernels"


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """One task of a step.

    Attributes
    ----------
    part
        Which part of the minibatch it works on.
    share
        Which channels, or samples, of its stage are its own; None: its layers are not divided.
    cuts
        Which part of the gradients of which stages' outputs goes to which worker, channels by their numbers. The
        gradients of other stages that it works on are left for a later task of its worker.
    taken
        Other stages' outputs that it works on, in the order of its inputs.
    away
        To how many other workers each part of its result goes.
    work
        Part of the seconds of its whole stage, forward and backward, that its share of the kernels takes.
    """

    kind: TaskKind
    label: str
    stage: int
    worker: str
    part: int
    inputs: tuple[TaskInput, ...]
    share: Share | None = None
    cuts: Mapping[int, Cuts] = field(default_factory=dict)
    taken: tuple[Taken, ...] = ()
    away: int = 0
    work: float = 0.0

    def given(self, *what: What | None) -> list[TaskInput]:
        """Its inputs of these kinds."""
        return [each for each in self.inputs if each.what in what]
