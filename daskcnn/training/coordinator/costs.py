"""Costs of an epoch for the workers of a layer-sharded run: counters that are asked for now and then, and add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskcnn.events import EpochWorker, Spent
from daskcnn.training.coordinator.looks import Look
from daskcnn.training.coordinator.shares import ShareWatch


class StepCosts:
    """Counters since the epoch's begin.

    Attributes
    ----------
    spent : by worker.
    awaited : whether an answer is to come.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.awaited = False
        self._ask = 0
        self._watch: ShareWatch | None = None

    def ask(self, watch: ShareWatch) -> int:
        """The number of a new ask. watch: of the shares that the workers have now."""
        self._ask += 1
        self.awaited, self._watch = True, watch
        return self._ask

    def answered(self, ask: int, spent: Mapping[str, Spent]) -> ShareWatch | None:
        """Add an answer up. Returns the watch that it was asked for; None: it is of no use any more."""
        if not self.awaited or ask != self._ask:
            return None
        self.awaited = False
        self.spent |= {worker: added_up(self.spent.get(worker), own) for worker, own in spent.items()}
        return self._watch

    def forget(self) -> None:
        """Count anew; an answer that is to come is of no use any more."""
        self.spent, self.awaited = {}, False

    def rows(self, look: Look) -> list[EpochWorker]:
        """The epoch's costs as they are logged: a worker waited whenever it did not compute."""
        samples, seconds = look.trained.samples, look.seconds
        return [
            EpochWorker(**own.model_dump(), samples=samples, wait=max(0.0, seconds - own.busy), communication=0.0)
            for own in self.spent.values()
        ]


def added_up(some: Spent | None, more: Spent) -> Spent:
    """The sum of a worker's counters of two times."""
    if some is None:
        return more
    return Spent(
        name=more.name,
        busy=some.busy + more.busy,
        conv_seconds=_sum(some.conv_seconds, more.conv_seconds),
        conv_samples=_sum(some.conv_samples, more.conv_samples),
        bytes_up=some.bytes_up + more.bytes_up,
        bytes_down=some.bytes_down + more.bytes_down,
    )


def _sum(a: Mapping[str, float], b: Mapping[str, Any]) -> dict[str, float]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
