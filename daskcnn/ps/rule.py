"""The base of the update rules: the replica's side and the server's, as pure functions over explicit state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from daskcnn.frozen import frozen
from daskcnn.ps.gradient_noise import GradientNoise
from daskcnn.ps.messages import Pace, Push, RuleState, Vector
from daskcnn.ps.vectors import sample_weights, weighted_sum
from daskcnn.ps.versions import Bases, Clocks


def parameter(default: Any, description: str, because: str, **bounds: float) -> Any:
    """A rule's parameter with bounds (`ge`, `gt`, `le`). because: why a value beyond them is refused, in words."""
    extra: dict[str, Any] = {"because": because}
    return Field(default, description=description, json_schema_extra=extra, **bounds)  # type: ignore[call-overload]


class Action(StrEnum):
    """An action of a replica after a step."""

    PUSH = "push"
    PULL = "pull"


@dataclass(slots=True)
class Local:
    """A replica's side. All vectors have the center's length and dtype, and lie where the replica computes.

    weights: trained in place. base: the center they started from, never written. memory: the rule's own, by name
    (ADMM's dual variables, where Downpour's next push begins). gradients: of the last step, with the change of what
    layers keep behind them, where the rule merges those; the weights are not trained then. pace: of that step. besides:
    places of what layers keep besides parameters.
    """

    weights: Vector
    base: Vector
    base_version: int = 0
    memory: dict[str, Vector] = field(default_factory=dict)
    gradients: Vector | None = None
    pace: Pace | None = None
    noise: GradientNoise | None = None
    besides: tuple[slice, ...] = ()


@frozen
class View:
    """The rule's view of the server. version: merges so far. expected: pushes that a barrier waits for.

    bases: which version each worker trains from. clocks: how many pushes of each were merged.
    """

    version: int
    expected: int
    bases: Bases
    clocks: Clocks = field(default_factory=Clocks)


@frozen
class Merge:
    """A new center (a new array), the rule's new state, what each pusher is told (None: the center) and its γ.

    finite: whether the rule has seen that center and state hold no NaN and no infinity; if not, the server looks.
    pace: `center` is the gradient of all pushes, and the server is to step by it. ahead: the center from this number on
    is as it was worked out before the pushes were complete. squares: squared norms of the pushed gradients and, last,
    of the merged one; empty where they were not taken.
    """

    center: Vector
    state: RuleState = field(default_factory=dict)
    replies: Mapping[str, Vector] | None = None
    gamma: Mapping[str, float] = field(default_factory=dict)
    finite: bool = False
    pace: Pace | None = None
    ahead: int | None = None
    squares: tuple[float, ...] = ()


class UpdateRule(BaseModel, ABC):
    """One rule; its fields are the parameters of the job's `[rule]` table, unknown ones are refused.

    barrier: whether the pushes of all workers are merged together, or each as it comes. answers: what the reply to a
    push brings. fewest: workers that it needs. swaps: whether workers swap samples between rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    barrier: ClassVar[bool]
    answers: ClassVar[Literal["center", "difference", "nothing"]] = "center"
    fewest: ClassVar[int] = 1
    swaps: ClassVar[bool] = False
    usual_rate: ClassVar[float] = 1.0
    """Factor of the optimizer's usual learning rate, where exchanges take back a part of every step."""
    chooses_workers: ClassVar[bool] = False

    def problems(self, epochs: int) -> Iterator[str]:
        """Parameters that contradict a run of this length, a line each: `rule.key = value: reason; remedy`."""
        return iter(())

    def problems_with_groups(self, size: int) -> Iterator[str]:
        """Parameters that replicas of several workers cannot have, a line each. size: workers in a group."""
        if type(self).local_step is not UpdateRule.local_step:
            yield (
                f"train.replica_size = {size}: the rule changes the gradients of every step, which is not built for "
                "groups of workers; use 1, or another strategy"
            )

    def for_groups(self) -> Self:
        """The rule as replicas of several workers have it, where nothing else is asked for."""
        return self

    def problems_with_split_server(self, shards: int) -> Iterator[str]:
        """Parameters that contradict a server in several ranges, a line each. shards: ranges."""
        return iter(())

    def for_resumed(self) -> tuple[UpdateRule, ...]:
        """The rules by which a run of this one may have trained: itself, unless it chooses one."""
        return (self,)

    # --- what the rest of a run must know of it ---

    @property
    def serverless(self) -> bool:
        """True if replicas meet peer to peer, without a parameter server."""
        return False

    @property
    def judges_pushes(self) -> bool:
        """True if every push is weighed by its accuracy on the validation samples."""
        return False

    def wire(self, asked: str) -> str:
        """The number type in which vectors travel. asked: `cluster.wire`."""
        return asked

    # --- the replica's side ---

    @property
    def period(self) -> int | None:
        """Steps from one push to the next; None: only the round's end is one."""
        return None

    @property
    def overlaps(self) -> bool:
        """True if a replica may train on while it pushes and pulls, and add that gain to the reply."""
        return False

    def passes(self, epochs: int) -> int:
        """The times that a round presents the worker's samples, in a run of this length."""
        return 1

    @property
    def takes_means(self) -> bool:
        """True if all replicas go on from a mean of their weights, with which linear steps agree."""
        return False

    @property
    def overshoots(self) -> bool:
        """True if a merge may go beyond the mean of the weights, and `mean` says what that is."""
        return False

    @property
    def merges_gradients(self) -> bool:
        """True if replicas push gradients of single steps, and the server makes the optimizer's steps."""
        return False

    @property
    def shares_steps(self) -> bool:
        """True if `train.batch_size` samples are shared by all replicas, false if each has as many in a step."""
        return False

    @property
    def steps_by_speed(self) -> bool:
        """True if replicas make unequal numbers of steps between two meetings, as `meetings` says."""
        return False

    def meetings(self, steps: int, step: float, exchange: float | None) -> int:
        """The meetings in a round of all, the round's end included, where `steps_by_speed`: one in `period` steps.

        steps: those of the fastest replica, each of `step` seconds. exchange: seconds that a meeting takes; None: not
        known yet.
        """
        return -(-steps // (self.period or steps))

    def at_usual_rate(self) -> Self:
        """The rule of a job that gives no learning rate."""
        return self

    def rate(self, replicas: int, power: float = 1.0) -> float:
        """The factor of the learning rate where this number of replicas trains.

        power: of a step's samples, by which the optimizer's rate grows with them.
        """
        return 1.0

    def begin(self, local: Local, center: Vector, version: int) -> None:
        """Start, or start again, from the center."""
        local.weights[...] = center
        local.base, local.base_version = center, version
        local.memory.clear()

    def local_step(self, grads: Vector, local: Local) -> Vector:
        """The gradients to descend by, given the loss's own; ADMM adds its proximal term here.

        grads: of the parameters, which come first in the weights. May be written to.
        """
        return grads

    def due(self, step: int, *, round_end: bool) -> frozenset[Action]:
        """The actions after this step, counted from 1 in each round; a push goes before a pull.

        A push's reply brings the center; PULL is for rules that pull at other times than they push.
        """
        push = round_end or (self.period is not None and step % self.period == 0)
        return frozenset({Action.PUSH}) if push else frozenset()

    def payload(self, local: Local) -> Vector:
        """The vector to push: here, the local weights themselves. The receiver copies what it keeps."""
        return local.weights

    def pushed(self, local: Local) -> Vector:
        """The payload as it leaves."""
        return self.payload(local)

    def pushes_weights(self, pace: Pace | None) -> bool:
        """True if a push of this pace is the replica's weights, and not a gradient or what they have gained."""
        return True

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """Go on from the reply to a push: here, from the center."""
        local.weights[...] = answer
        local.base, local.base_version = answer, version

    def pulled(self, local: Local, center: Vector, version: int) -> None:
        """Go on from the reply to a pull, where the rule asks for one."""
        raise NotImplementedError(f"{type(self).__name__} never pulls")

    def of_part(self, quality: float, part: float) -> float:
        """The Q of a push that stands for this part of what it was to, as its worker leaves. quality: of its weights.

        Here the same, since pushes count by their samples, or by what the weights have gained.
        """
        return quality

    # --- the server's side ---

    def init(self, center: Vector) -> RuleState:
        """The state before the first merge."""
        return {}

    def ready(self, pending: dict[str, Push], view: View) -> tuple[Push, ...]:
        """Those of the waiting pushes (by worker, in order of arrival) to merge now, all in one; none: wait.

        A barrier's come in the order of their workers' names, so that the sum does not depend on who came first.
        """
        if not self.barrier:
            return (next(iter(pending.values())),)
        return tuple(pending[worker] for worker in sorted(pending)) if len(pending) >= view.expected else ()

    @abstractmethod
    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The new center. `center`, `state` and the pushes are not changed; `view` is from before the merge."""

    def mean(self, center: Vector, pushes: Sequence[Push], view: View, *, coded: bool) -> Vector:
        """Values that layers keep besides parameters, behind a merge of these pushes, where the rule `overshoots`.

        Running statistics of all replicas move towards the same numbers. Added up, or with momentum, they would go
        beyond them. center, pushes: at those places alone. coded: the pushes have travelled in int8.
        """
        gained, _ = weighted_sum([push.payload for push in pushes], sample_weights(pushes))
        return center + gained


class AccuracyWeighted(UpdateRule):
    """A rule that goes by Q, the accuracy of the local weights; of a loss without accuracy Q = 1 / (1 + loss).

    accuracy_on: Q is measured on the validation slice, the same for every replica, or is the round's training accuracy.
    """

    every: int = parameter(
        0,
        "Steps between two pushes; 0 is the round's end, as in the paper. With `sgwu` those of the fastest worker: the "
        "others make as many as they can meanwhile.",
        "it counts the steps between two pushes; 0 is the round's end",
        ge=0,
    )
    accuracy_on: Literal["validation", "train"] = Field(
        "validation", description="Samples on which Q is measured: the validation samples, or those of the round."
    )

    @property
    def period(self) -> int | None:
        return self.every or None

    @property
    def judges_pushes(self) -> bool:
        return self.accuracy_on == "validation"


class Asynchronous(UpdateRule):
    """A rule that merges each push by itself.

    max_staleness: how many pushes a worker may be ahead of the slowest one (stale synchronous parallel; 0 is lockstep).
    A push of one that is further ahead waits until the slowest has caught up. None: any number.
    """

    barrier: ClassVar[bool] = False
    max_staleness: int | None = parameter(
        None,
        "Pushes that a worker may be ahead of the slowest one. Default: no bound.",
        "it counts pushes; leave it out for no bound",
        ge=0,
    )

    @property
    def overlaps(self) -> bool:
        """Unless it may have to wait for others."""
        return self.max_staleness is None

    def ready(self, pending: dict[str, Push], view: View) -> tuple[Push, ...]:
        """The first that came and is not too far ahead; the slowest worker's never is, so that somebody goes on."""
        if self.max_staleness is None:
            return super().ready(pending, view)
        most = view.clocks.lowest + self.max_staleness
        # all that wait are one push too far ahead: once the slowest goes on all are ready, before that none
        first, last = next(iter(pending.values())), next(reversed(pending.values()))
        return next(((push,) for push in (first, last) if view.clocks.of(push.worker) <= most), ())

    def pushed(self, local: Local) -> Vector:
        """The payload; with the values of what layers keep besides parameters where gains are added up."""
        payload = self.payload(local)
        if self.overshoots:
            for place in local.besides:
                payload[place] = local.weights[place]
        return payload

    def mean(self, center: Vector, pushes: Sequence[Push], view: View, *, coded: bool) -> Vector:
        """The center and 1/k of the way to the one of the k replicas that pushes. In int8 there is its gain alone.

        By values it is a mean of some that replicas had, however stale a push is. By gains it may go beyond them.
        """
        (push,) = pushes
        return center + (push.payload if coded else push.payload - center) / max(1, len(view.bases))


class AddsGains(Asynchronous):
    """An asynchronous rule whose center gains, by each push, what a replica has gained.

    lower_lr: the learning rate of k replicas is times min(1, 2/k²). The center makes the steps of all k, and each of
    them is k late: two, three and eight workers train best near a half, a quarter and a thirtieth of one's rate
    (benchmarks/studies/README.md).
    """

    lower_lr: bool | None = Field(
        None,
        description="The learning rate is times 2/k² where k workers or groups train, 2 or more: the center makes the "
        "steps of all of them, and each is k steps late. Default: true where `train.lr` is not given, else false.",
    )

    @property
    def overshoots(self) -> bool:
        """True: what all workers gain is added up."""
        return True

    def pushes_weights(self, pace: Pace | None) -> bool:
        return False

    def at_usual_rate(self) -> Self:
        return self.model_copy(update={"lower_lr": True}) if self.lower_lr is None else self

    def rate(self, replicas: int, power: float = 1.0) -> float:
        return min(1.0, 2 / max(1, replicas) ** 2) if self.lower_lr else 1.0
