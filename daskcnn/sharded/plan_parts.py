"""Parts of a step's plan: groups of tasks, flows between groups, single tasks and their inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import EllipsisType
from typing import Literal, NamedTuple, TypeAlias

from daskcnn.sharded.stages import By, Share, Side, Stage

Kernels: TypeAlias = Sequence[Mapping[str, int]]
"""The number of kernels of each stage by worker; workers that have none are left out."""
What: TypeAlias = Literal["outputs", "merged outputs", "gradients", "merged gradients", "edges", "weight gradients"]
"""The content of a message. The last two are counted in numbers a step, the others in numbers a sample."""
Cut: TypeAlias = tuple[EllipsisType | slice, ...]
"""Part of an array (…, N, C)."""
Cuts: TypeAlias = Mapping[str, Cut]
"""The part of a result that goes to each worker."""
ALL = ""
"""A key of `Cuts` in place of a name: every worker that needs any of a result gets this part."""
WHOLE: Cut = (...,)


class TaskKind(Enum):
    """The kind of a task. The value is the task's name, or an ending of its stage's name."""

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
    """Messages from tasks of one group to those of another: one from every sender to every other worker that receives.

    Attributes
    ----------
    stage : the stage whose outputs, gradients of outputs or gradients of weights these are
    sizes : numbers of one message, by its sender; if `by_receiver`, by its receiver
    pairs : further messages, by sender and receiver, in order: for workers that only add some of the channels
    """

    stage: int
    what: What
    senders: Collection[str]
    receivers: Collection[str]
    sizes: Mapping[str, int]
    by_receiver: bool = False
    pairs: Mapping[tuple[str, str], int] = {}

    def numbers(self, sender: str, receiver: str) -> int:
        """Numbers of this message; 0 if it stays on its worker."""
        if sender == receiver:
            return 0
        if (sender, receiver) in self.pairs:
            return self.pairs[sender, receiver]
        return self.sizes[receiver if self.by_receiver else sender]

    def senders_to(self, receiver: str) -> list[str]:
        """Workers that have a message for this one, which may be among them."""
        whole = self.senders if receiver in self.receivers else ()
        return [*whole, *(sender for sender, other in self.pairs if other == receiver)]

    @property
    def moved(self) -> dict[str, WorkerTraffic]:
        """Numbers that each worker sends and receives; workers that do neither are left out."""
        one, others = (self.receivers, self.senders) if self.by_receiver else (self.senders, self.receivers)
        sizes = {w: size for w, size in self.sizes.items() if w in one}
        total, moved = sum(sizes.values()), dict[str, WorkerTraffic]()
        for w in dict.fromkeys((*sizes, *others)):
            own = sizes.get(w, 0)
            gives, takes = (own * (len(others) - 1), total - own) if w in others else (own * len(others), 0)
            if gives or takes:
                moved[w] = WorkerTraffic(takes, gives) if self.by_receiver else WorkerTraffic(gives, takes)
        for (sender, receiver), size in self.pairs.items():
            if sender != receiver and size:
                up, down = moved.get(sender, NOTHING)
                moved[sender] = WorkerTraffic(up + size, down)
                up, down = moved.get(receiver, NOTHING)
                moved[receiver] = WorkerTraffic(up, down + size)
        return moved


NOTHING = WorkerTraffic(0, 0)


class Arrival(NamedTuple):
    """A flow to a group of tasks. source: the number of the group in the plan that it comes from."""

    flow: Flow
    source: int


class TaskGroup(NamedTuple):
    """Tasks of one kind and stage, one a worker, for each part of a minibatch.

    Attributes
    ----------
    inputs : the flows from other groups. Values on their own workers are not among them.
    source : the number of the group whose results they wait for, besides `inputs`
    once : true if they run once a step, behind the minibatch's last part
    """

    kind: TaskKind
    stage: int
    workers: Collection[str]
    inputs: Sequence[Arrival] = ()
    source: int | None = None
    once: bool = False


class WantedEdge(NamedTuple):
    """Channels at one end of a neighbour's shard that a worker computes besides its own."""

    neighbour: str
    side: Side
    channels: int


class Carried(NamedTuple):
    """A value that one step leaves for the next: a worker's weights, or the edges of its shard."""

    what: Literal["shard", "merged", "edges"]
    stage: int
    worker: str


@dataclass(frozen=True, slots=True)
class TaskInput:
    """An input of a task.

    Attributes
    ----------
    source : the number of the task that makes it, or the value that the previous step left
    what : its content; None: the task only waits for it
    cut : the part of the sender's array that travels
    place : the place of its channels among those that the task needs; None: it has all of them
    nbytes : bytes that travel; 0 from the task's own worker
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
    """Outputs of a stage that a task reads.

    Attributes
    ----------
    count : the number of the task's inputs that bring them; 0: its worker got them before
    start : the first channel that they bring
    kept : true if other tasks of its worker read them too
    by : the kind of shard that they come from
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
    part : the part of the minibatch that it works on
    share : its channels, or samples, of its stage; None: its layers are not divided
    cuts
        By stage, the part of the gradient of the stage's outputs that each worker gets. Gradients of other stages that
        it reads are left for a later task of its worker.
    taken : other stages' outputs that it reads, in the order of its inputs
    away : the number of other workers that each part of its result goes to
    work : its part of the seconds of the whole stage, forward and backward
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
