"""Layer sharding on real processes. What a run computes and moves is tested in one process (test_sharded_training)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from distributed import Client

from tests.cluster.cluster_jobs import Watch, counted_seconds, kill_worker, run
from tests.cluster.references import reference
from tests.cluster.sharded_networks import layer_job, losses_of

pytestmark = pytest.mark.cluster


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_layer_sharding_follows_one_process_for_50_steps(
    three_workers: Client, synthetic: str, runs: str, dtype: str, tolerance: float
) -> None:
    # at 0.01 a rounding error may flip a near-tie of a max pool, which float32 does not forgive within 50 steps
    job = layer_job(synthetic, runs, model={"dtype": dtype}, train={"lr": 0.003}, cluster={"workers": {"cpu": 3}})
    watch = Watch()
    run(three_workers, job, watch)
    expected = reference(job).losses
    assert len(expected) == 50
    np.testing.assert_allclose(losses_of(watch), expected, rtol=tolerance)


# --- parts that are called for, of three workers' gradients ---


def lose_parts(count: int, dask_worker: Any = None) -> None:
    """On a worker: so many calls for parts of gradients find none."""
    from daskcnn.cluster.layers import transfers

    left = [count]

    async def answer(**asked: Any) -> dict[str, Any]:
        left[0] -= 1
        return {"missing": "somebody took it"} if left[0] >= 0 else await transfers.answer_part(**asked)

    dask_worker.handlers[transfers.CALL] = answer


def lose_none(dask_worker: Any = None) -> None:
    dask_worker.handlers.pop("daskcnn_part", None)


@contextmanager
def lost_parts(client: Client, count: int) -> Iterator[None]:
    client.run(lose_parts, count)
    try:
        yield
    finally:
        client.run(lose_none)


def test_a_part_that_is_not_to_be_had_costs_the_steps_since_the_snapshot_and_nothing_else(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    job = layer_job(
        synthetic,
        runs,
        data={"limit": 292},
        model={"dtype": "float64"},
        train={"epochs": 1, "batch_size": 16},
        cluster={"workers": {"cpu": 3}},
    )
    watch = Watch()
    with lost_parts(three_workers, 1):
        result = run(three_workers, job, watch)
    assert "somebody took it: back to step 0" in [event["message"] for event in watch.of("warning")]
    np.testing.assert_allclose(result.model.vector, reference(job).weights, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_run_goes_on_without_a_worker_that_stands_still(three_workers: Client, synthetic: str, runs: str) -> None:
    """SIGSTOP: its connections stay open, and nothing comes through them any more."""
    job = layer_job(
        synthetic,
        runs,
        model={"dtype": "float64"},
        train={"epochs": 2, "kernel_shares": "speeds"},
        cluster={"stall_timeout": 8.0, "chain": 5, "workers": {"cpu": 3}},
        run={"report_every": 4},
    )
    stop, go_on = (kill_worker(three_workers, "cpu-1", signum) for signum in (signal.SIGSTOP, signal.SIGCONT))
    watch = Watch("steps", stop, lambda event: event["step"] >= 12)
    # by real seconds on a busy machine a worker may have, or get later, no kernel at all: no step waits for it then
    with counted_seconds(three_workers, {}), ExitStack() as at_end:
        at_end.callback(go_on)
        result = run(three_workers, job, watch)
    assert [event["worker"] for event in watch.of("worker-lost")] == ["cpu-1"]
    assert "back to the snapshot of step 10, on 2 workers" in [event["message"] for event in watch.of("warning")]
    np.testing.assert_allclose(result.model.vector, reference(job).weights, rtol=1e-9, atol=1e-12)
