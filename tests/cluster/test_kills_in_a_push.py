"""A worker's process that is killed while it sends a push: before it, in its middle, and once it has left."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

import pytest
from distributed import Client

from tests.cluster.cluster_jobs import Watch, addresses_of, run, small_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
EPOCHS = 10


def die_in_push(when: str, which: int) -> None:
    """On a worker: its process is killed as it sends this push."""
    from daskcnn.cluster.server import stream
    from daskcnn.ps import Push

    send, numbers = stream.send_request, count(1)

    def dying(to: Any, request: Any, stopped: Any) -> None:
        if not isinstance(request, Push) or next(numbers) != which:
            send(to, request, stopped)
            return
        if when == "after":
            send(to, request, stopped)
        elif when == "in":
            head, payload = stream._push_buffers(stream._PUSH, request)
            to.send(head, payload[: len(payload) // 2], stopped=stopped)
        os.kill(os.getpid(), signal.SIGKILL)

    vars(stream)["send_request"] = dying


@pytest.mark.parametrize("strategy", ["bsp", "sgwu", "agwu"])
@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_a_push_of_a_killed_worker_is_merged_once_or_not_at_all(
    three_workers: Client, synthetic: str, runs: str, when: str, strategy: str
) -> None:
    """The nanny brings the worker back. Every presentation is made, and the server has refused and repeated none."""
    three_workers.run(die_in_push, when, 3, workers=[addresses_of(three_workers)["cpu-1"]])
    watch = Watch()
    train = {"strategy": strategy, "partition": "udpa", "epochs": EPOCHS}
    result = run(three_workers, small_job(synthetic, runs, train=train), watch)
    assert result.summary["status"] == "done"
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-1"]
    assert sum(event["samples"] for event in watch.of("round")) == EPOCHS * 800
    counted = watch.of("server")
    assert counted
    assert all(event["repeated"] == 0 for event in counted)
