"""The stops of a replica's round at which it exchanges weights, and the steps between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from daskcnn.nn import OptimizerState
from daskcnn.partition.allocation import count
from daskcnn.partition.rounds import Round
from daskcnn.partition.step_shares import StepSizes
from daskcnn.ps import Action, Local, UpdateRule
from daskcnn.ps.gradient_noise import GradientNoise
from daskcnn.store.loader import BatchPlan, batch_edges
from daskcnn.training.gradient_parts import TellStep
from daskcnn.training.replica import Replica, Trained


@dataclass(frozen=True, slots=True)
class TrainSteps:
    """Make the round's next steps, up to a stop at which the rule wants a push, a pull or both, or the round's end.

    first, step: the steps to make, counted from 1 in each round. gained, samples: the samples of these steps; the
    samples behind the replica afterwards. judge: weights are judged before the push. last: True at the round's end.
    """

    first: int
    step: int
    gained: int
    samples: int
    push: bool
    pull: bool
    judge: bool
    last: bool

    def sized(self, sizes: StepSizes | None) -> TrainSteps:
        """Return the stop in a round whose minibatches may have changed."""
        if sizes is None or not sizes.changed:
            return self
        samples = sizes.until(self.step)
        return replace(self, gained=samples - sizes.until(self.first - 1), samples=samples)


class Cadence:
    """The stops of every round of a rule; worked out once for rounds of the same shape.

    validation: the number of validation samples. Without any, a rule that weighs pushes goes by the round's training
    accuracy.
    """

    def __init__(self, rule: UpdateRule, batch_size: int, validation: int = 0) -> None:
        self._rule, self._batch_size = rule, batch_size
        self._judges = rule.judges_pushes and validation > 0
        self._known: dict[tuple[int, int, int | None, int | None, bool, int], tuple[TrainSteps, ...]] = {}

    def stops(self, round_: Round) -> tuple[TrainSteps, ...]:
        """Return the stops in turn; the last one is the round's end."""
        ranges = round_.ranges
        # mostly one range, and called millions of times
        whole = ranges[0][1] - ranges[0][0] if len(ranges) == 1 else count(ranges)
        shape = round_.samples, whole, round_.steps, round_.meetings, round_.alone, round_.judged_every
        if (stops := self._known.get(shape)) is None:
            stops = self._known[shape] = tuple(self._stops(*shape))
        return stops

    def samples(self, round_: Round, step: int) -> int:
        """Return the samples of a round up to this step."""
        steps = self._steps(round_.samples, count(round_.ranges), round_.steps)
        return next(done for number, done in steps if number == step)

    def exchanges(self, round_: Round) -> frozenset[int]:
        """Return the steps of a round, counted from 1, after which the rule wants an exchange."""
        return frozenset(stop.step for stop in self.stops(round_) if stop.push or stop.pull)

    def _stops(
        self, samples: int, whole: int, steps: int | None, meetings: int | None, alone: bool, judged_every: int
    ) -> Iterator[TrainSteps]:
        """Yield the stops of a round that `Replica.training` cuts into minibatches in the same way."""
        made = before = pushes = 0
        for step, done in self._steps(samples, whole, steps):
            last = done == samples
            due = frozenset() if alone and not last else self._due(step, steps, meetings, last=last)
            if due or last:
                push = Action.PUSH in due
                judge = self._judges and push and pushes % judged_every == 0
                pushes += push
                yield TrainSteps(made + 1, step, done - before, done, push, Action.PULL in due, judge, last)
                made, before = step, done

    def _steps(self, samples: int, whole: int, steps: int | None) -> Iterator[tuple[int, int]]:
        """Yield the number of each step of a round, from 1, and the samples behind it."""
        plan = BatchPlan((), self._batch_size, 0, steps=steps)
        passes = ((begun, batch_edges(plan, min(whole, samples - begun))) for begun in range(0, samples, whole))
        return enumerate((begun + hi for begun, edges in passes for _, hi in edges), 1)

    def _due(self, step: int, steps: int | None, meetings: int | None, *, last: bool) -> frozenset[Action]:
        """Return what is due after a step. Meetings lie at equal distances, for every replica at the same parts."""
        if meetings is None or (steps is None and meetings > 1):
            return self._rule.due(step, round_end=last)
        meets = last if steps is None else step * meetings // steps > (step - 1) * meetings // steps
        return self._rule.due(step, round_end=True) if meets else frozenset()


def steps_of_round(
    replica: Replica,
    rule: UpdateRule,
    round_: Round,
    local: Local,
    *,
    scale: float = 1.0,
    stop: Callable[[], bool] = lambda: False,
    sizes: StepSizes | None = None,
    tell: TellStep | None = None,
    optimizer: OptimizerState | None = None,
) -> Generator[Trained, None, None]:
    """Train the round a step at a time; call `close()` if you stop iterating early.

    local: the replica's weights, with the numbers that the rule's `local_step` goes by. Where the rule merges gradients
    these are noted in it, and the weights stay. scale: factor of the learning rate. sizes: of the minibatches, where
    the replica's exchanges may change them. tell: as for `Replica.training`, of gradients that are merged. optimizer:
    the state to begin with, where others made the steps before; None: its own. Yields the sums of the round after each
    step. Raises Stopped when `stop`, called before each step, says so, Diverged when a loss is not finite.
    """
    replica.restart_optimizer()
    if optimizer is not None:
        replica.adopt_optimizer(optimizer)
    descends = round_.alone or not rule.merges_gradients
    local.gradients, local.pace = None if descends else replica.gradients, None
    local.noise = GradientNoise.of(round_.noise) if round_.halved else None
    steps = replica.training(
        round_.ranges,
        round_.samples,
        presentation=round_.number * rule.passes(replica.job.train.epochs),
        progress=round_.progress,
        steps=round_.steps,
        stop=stop,
        adjust=lambda grads: rule.local_step(grads, local),
        scale=scale,
        descends=descends,
        sizes=sizes,
        tell=None if descends else tell,
        halved=round_.halved,
        noise=local.noise,
    )
    return steps if descends else _noted(steps, local)


def _noted(steps: Generator[Trained, None, None], local: Local) -> Generator[Trained, None, None]:
    """Note the pace of each step beside the gradients."""
    with closing(steps):
        for trained in steps:
            local.pace = trained.lr, trained.progress
            yield trained
