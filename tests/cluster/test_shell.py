"""What the cluster raises, as facts: without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.cluster.lost import WorkersLost
from daskcnn.cluster.shell import look_round
from daskcnn.errors import Interrupted, Lost
from daskcnn.training.coordinator import facts

GONE = Lost("scheduler tcp://s: connection lost")


def context(*broken: Exception) -> Any:
    """A context that raises this when it looks round, until signals are ignored."""
    found = list(broken)

    def look() -> None:
        if found:
            raise found[0]

    return SimpleNamespace(
        workers=SimpleNamespace(look_round=look, alive={}),
        connection=SimpleNamespace(ignore_signals=found.clear),
        calibrations={},
    )


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (WorkersLost(["a", "b"]), facts.WorkerGone(("a", "b"), "connection lost", 3.0)),
        (GONE, facts.SchedulerGone(GONE, 3.0)),
    ],
)
def test_who_is_gone_is_told(broken: Exception, told: facts.Fact) -> None:
    assert look_round(context(broken), 3.0) == [told]


def test_a_signal_is_told_once() -> None:
    there = context(Interrupted("interrupted by signal 15", 15))
    assert look_round(there, 3.0) == [facts.Interrupted(15, 3.0)]
    assert look_round(there, 4.0) == []
