"""What the cluster raises, as facts: without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from distributed.client import ClosedClientError

from daskcnn.cluster.link.calls import WorkersLost
from daskcnn.cluster.shell.shell import Shell, look_round
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


def test_nothing_is_left_to_give_up_where_the_scheduler_is_gone() -> None:
    """Dask's client refuses to cancel then. The loss itself is found by the next look."""

    def cancel() -> None:
        raise ClosedClientError("Client is closed. Can't send cancel-keys message.")

    shell = Shell(context(), SimpleNamespace())
    shell._work["a"] = SimpleNamespace(cancel=cancel)
    shell.give_up("a")
    assert shell._work == {}


def test_a_signal_is_told_once() -> None:
    there = context(Interrupted("interrupted by signal 15", 15))
    assert look_round(there, 3.0) == [facts.Interrupted(15, 3.0)]
    assert look_round(there, 4.0) == []
