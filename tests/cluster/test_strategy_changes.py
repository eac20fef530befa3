"""A run on real processes whose way to train changes between two rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client

from daskcnn.store import Batch
from tests.cluster.cluster_jobs import Watch, addresses_of, run, small_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
EPOCHS, EACH, SLOW = 5, 3e-3, 0.2


def take(each: float | None) -> None:
    """On a worker: from now on its steps take this many seconds a sample besides; None: none, and they are as ever."""
    import time

    from daskcnn.training.replica import Replica

    step = getattr(Replica.step, "as_ever", Replica.step)

    def slowed(replica: Replica, batch: Batch, *how: Any, **more: Any) -> Any:
        time.sleep((each or 0.0) * len(batch.labels))
        return step(replica, batch, *how, **more)

    slowed.as_ever = step  # type: ignore[attr-defined] # to find it again
    Replica.step = step if each is None else slowed  # type: ignore[method-assign, assignment] # likewise


@pytest.fixture
def steady(three_workers: Client) -> Iterator[Client]:
    """Workers whose speeds nothing else on the machine disturbs much."""
    three_workers.run(take, EACH)
    yield three_workers
    three_workers.run(take, None)


def test_a_worker_that_gets_slow_is_left_out_between_two_rounds(steady: Client, synthetic: str, runs: str) -> None:
    """The others go on from the state that is kept, in the same run."""
    slow = list[str]()

    def slow_down() -> None:
        slow.append(watch.of("round")[0]["worker"])
        steady.run(take, SLOW, workers=[addresses_of(steady)[slow[0]]])

    watch = Watch("round", slow_down)
    job = small_job(synthetic, runs, train={"strategy": "auto", "epochs": EPOCHS})
    result = run(steady, job, watch)
    assert len(used(watch.of("strategy")[0]["candidates"][0])) > 1
    changed = next(each for each in watch.of("strategy") if each["before"] and {*slow} - used(each["candidates"][0]))
    assert {*slow} < used(changed["before"])
    at = watch.events.index(changed)
    (left,) = (event for event in watch.events[at:] if event["event"] == "worker-left")
    assert left["worker"] == slow[0]
    assert left["reason"].startswith("left out, with it a step would take ")
    assert "checkpoint" in {event["event"] for event in watch.events[at - 3 : at]}
    rounds = [event for event in watch.events[at:] if event["event"] == "round"]
    assert rounds
    assert {event["worker"] for event in rounds}.isdisjoint(slow)
    assert sum(event["samples"] for event in watch.of("round")) == EPOCHS * 800
    losses = [event["loss"] for event in watch.of("epoch")]
    assert losses[-1] < losses[0]
    assert result.summary["status"] == "done"


def used(step: dict[str, Any]) -> set[str]:
    return {*step["samples"]}
