"""Where in a round a replica meets the server: the steps in between need no events of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from daskcnn.partition.allocation import count
from daskcnn.partition.rounds import Round
from daskcnn.ps import Action, UpdateRule
from daskcnn.store.loader import BatchPlan, batch_edges


@dataclass(frozen=True, slots=True)
class Stop:
    """What the rule wants done once so many steps and samples of the round are behind the replica."""

    step: int
    samples: int
    push: bool
    pull: bool


class Cadence:
    """The stops of every round of a rule; worked out once for rounds of the same shape."""

    def __init__(self, rule: UpdateRule, batch_size: int) -> None:
        self._rule, self._batch_size = rule, batch_size
        self._known: dict[tuple[int, int, int | None], tuple[Stop, ...]] = {}

    def stops(self, round_: Round) -> tuple[Stop, ...]:
        """In turn; the last one is the round's end."""
        shape = round_.samples, count(round_.ranges), round_.steps
        if (stops := self._known.get(shape)) is None:
            stops = self._known[shape] = tuple(self._stops(*shape))
        return stops

    def _stops(self, samples: int, whole: int, steps: int | None) -> Iterator[Stop]:
        for step, done in enumerate(self._samples_after(samples, whole, steps), 1):
            due = self._rule.due(step, round_end=done == samples)
            if due:
                yield Stop(step, done, Action.PUSH in due, Action.PULL in due)

    def _samples_after(self, samples: int, whole: int, steps: int | None) -> Iterator[int]:
        """Samples behind the replica after each step, as `Replica.train` cuts a round into passes and minibatches."""
        plan = BatchPlan((), self._batch_size, 0, steps=steps)
        for begun in range(0, samples, whole):
            for _, hi in batch_edges(plan, min(whole, samples - begun)):
                yield begun + hi
