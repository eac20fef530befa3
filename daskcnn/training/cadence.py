"""The stops of a replica's round at which it exchanges weights, and the steps between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.partition.allocation import count
from daskcnn.partition.rounds import Round
from daskcnn.ps import Action, Local, UpdateRule
from daskcnn.store.loader import BatchPlan, batch_edges
from daskcnn.training.replica import Replica, Trained


@dataclass(frozen=True, slots=True)
class JudgeLocal:
    """Judge the replica's own weights on samples lo…hi of the training part."""

    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class TrainSteps:
    """Make the round's next steps, up to a stop at which the rule wants an exchange.

    Attributes
    ----------
    first, step : The steps to make, counted from 1 in each round.
    gained, samples : The samples of these steps; the samples behind the replica afterwards.
    push, pull : What the rule wants at the stop.
    judge : What is judged before the push; None if nothing is.
    last : True at the round's end.
    """

    first: int
    step: int
    gained: int
    samples: int
    push: bool
    pull: bool
    judge: JudgeLocal | None
    last: bool


class Cadence:
    """The stops of every round of a rule; worked out once for rounds of the same shape.

    Parameters
    ----------
    rule : Says what is due after which step.
    batch_size : Samples of a minibatch.
    validation:
        The samples lo…hi of the training part on which a rule that weighs pushes has them judged. Without any samples
        Q is the round's training accuracy.
    """

    def __init__(self, rule: UpdateRule, batch_size: int, validation: tuple[int, int] = (0, 0)) -> None:
        self._rule, self._batch_size = rule, batch_size
        self._judge = JudgeLocal(*validation) if rule.judges_pushes and validation[0] < validation[1] else None
        self._known: dict[tuple[int, int, int | None], tuple[TrainSteps, ...]] = {}

    def stops(self, round_: Round) -> tuple[TrainSteps, ...]:
        """Return the stops in turn; the last one is the round's end."""
        ranges = round_.ranges
        if len(ranges) == 1:  # as mostly; it is asked millions of times
            ((lo, hi),) = ranges
            whole = hi - lo
        else:
            whole = count(ranges)
        shape = round_.samples, whole, round_.steps
        if (stops := self._known.get(shape)) is None:
            stops = self._known[shape] = tuple(self._stops(*shape))
        return stops

    def exchanges(self, round_: Round) -> frozenset[int]:
        """The steps of a round, counted from 1, after which the rule wants an exchange."""
        return frozenset(stop.step for stop in self.stops(round_) if stop.push or stop.pull)

    def _stops(self, samples: int, whole: int, steps: int | None) -> Iterator[TrainSteps]:
        made = before = 0
        for step, done in enumerate(self._samples_after(samples, whole, steps), 1):
            last = done == samples
            due = self._rule.due(step, round_end=last)
            if due or last:
                push = Action.PUSH in due
                judge = self._judge if push else None
                yield TrainSteps(made + 1, step, done - before, done, push, Action.PULL in due, judge, last)
                made, before = step, done

    def _samples_after(self, samples: int, whole: int, steps: int | None) -> Iterator[int]:
        """Samples behind the replica after each step, as `Replica.training` cuts a round into minibatches."""
        plan = BatchPlan((), self._batch_size, 0, steps=steps)
        for begun in range(0, samples, whole):
            for _, hi in batch_edges(plan, min(whole, samples - begun)):
                yield begun + hi


def steps_of_round(
    replica: Replica,
    rule: UpdateRule,
    round_: Round,
    local: Local,
    *,
    scale: float = 1.0,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Trained, None, None]:
    """Train the round a step at a time; call `close()` if you stop iterating early.

    Parameters
    ----------
    local : The replica's weights, with what the rule's `local_step` goes by.
    scale : Factor of the learning rate.
    stop:
        Asked before each step.

    Yields
    ------
    What the round has come to after each step.

    Raises
    ------
    Stopped : When `stop` says so.
    Diverged : When a loss is not finite.
    """

    replica.restart_optimizer()

    def adjust(grads: Array) -> Array:
        return rule.local_step(grads, local)

    return replica.training(
        round_.ranges,
        round_.samples,
        presentation=round_.number * rule.passes(replica.job.train.epochs),
        progress=round_.progress,
        steps=round_.steps,
        stop=stop,
        adjust=adjust,
        scale=scale,
    )
