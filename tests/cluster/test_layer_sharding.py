"""Layer sharding on real processes, against one process that does the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from distributed import Client

from tests.cluster.cluster_jobs import Watch, one_process, run, sharded_by_speed, small_job

pytestmark = pytest.mark.cluster

REACHING: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 24, "size": 5, "pad": 2},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "dropout", "rate": 0.2},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 2},
    {"layer": "conv", "kernels": 16, "size": 3, "pad": 1},
    {"layer": "lrn", "size": 3, "alpha": 0.5},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 10},
]
"""Every shard needs its neighbours' channels, and draws its own part of dropout's mask."""

EACH = {"report_every": 1}
"""A report a step."""


def losses_of(watch: Watch) -> list[float]:
    return [event["loss"] for event in watch.of("steps")]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_layer_sharding_follows_one_process_for_50_steps(
    three_workers: Client,
    synthetic: str,
    runs: str,
    workers: int,
    dtype: str,
    tolerance: float,
) -> None:
    # at 0.01 a rounding error may flip a near-tie of a max pool, which float32 does not forgive within 50 steps
    job = small_job(
        synthetic, runs, model={"dtype": dtype}, train={"lr": 0.003}, cluster={"workers": {"cpu": workers}}, run=EACH
    )
    expected, _ = one_process(job)
    job = sharded_by_speed(job)
    watch = Watch()
    run(three_workers, job, watch)
    losses = [event["loss"] for event in watch.of("steps")]
    assert len(losses) == len(expected) == 50
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    kernels = watch.of("shards")[0]["kernels"]
    assert len(kernels) == workers
    assert sum(k["conv1"] for k in kernels.values()) == 6
    assert sum(k["conv2"] for k in kernels.values()) == 9


@pytest.mark.parametrize(
    ("workers", "sub_batches", "first", "wire"),
    [
        *((*shape, "kernels", "float32") for shape in [(2, 1), (3, 1), (2, 3), (3, 2)]),
        *((*shape, "samples", "float32") for shape in [(3, 1), (2, 3)]),
        (3, 1, "samples", "float16"),
    ],
)
def test_spread_layers_and_parts_of_minibatches_change_nothing(
    three_workers: Client,
    synthetic: str,
    runs: str,
    workers: int,
    sub_batches: int,
    first: str,
    wire: str,
) -> None:
    """Nor does it matter what of the first convolution is divided."""
    model = {"name": None, "layers": REACHING, "dtype": "float64"}
    cluster = {"workers": {"cpu": workers}, "wire": wire}
    job = small_job(synthetic, runs, model=model, train={"lr": 0.003}, cluster=cluster, run=EACH)
    expected, _ = one_process(job)
    job = sharded_by_speed(job, sub_batches=sub_batches, first_conv=first)
    watch = Watch()
    run(three_workers, job, watch)
    np.testing.assert_allclose(losses_of(watch), expected, rtol=1e-9 if wire == "float32" else 0.02)
    shards = watch.of("shards")[0]
    assert {tuple(by.values()) for by in shards["divided"].values()} == {(first, "kernels")}


def test_float16_on_the_wire_halves_what_travels(three_workers: Client, synthetic: str, runs: str) -> None:
    bytes_up, losses = {}, {}
    for wire in ("float32", "float16"):
        job = small_job(synthetic, runs, train={"strategy": "layer"}, cluster={"workers": {"cpu": 2}, "wire": wire})
        watch = Watch()
        result = run(three_workers, job, watch)
        bytes_up[wire], losses[wire] = result.summary["bytes"]["up"], losses_of(watch)
        assert result.summary["bytes"]["down"] == pytest.approx(bytes_up[wire], rel=0.01)
    # shards are measured anew for each run
    assert bytes_up["float16"] == pytest.approx(bytes_up["float32"] / 2, rel=0.1)
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=0.02)


# --- parts that are called for, of three workers' gradients ---


def lose_parts(count: int, dask_worker: Any = None) -> None:
    """On a worker: so many calls for parts of gradients find none."""
    from daskcnn.cluster.layers import transfers

    left = [count]

    async def answer(**asked: Any) -> dict[str, Any]:
        left[0] -= 1
        return {"missing": "somebody took it"} if left[0] >= 0 else await transfers._answer(**asked)

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
    job = small_job(synthetic, runs, train={"strategy": "layer", "epochs": 1}, cluster={"workers": {"cpu": 3}})
    job["model"]["dtype"] = "float64"
    whole = run(three_workers, job)
    watch = Watch()
    with lost_parts(three_workers, 1):
        result = run(three_workers, job, watch)
    assert "somebody took it: back to step 0" in [event["message"] for event in watch.of("warning")]
    np.testing.assert_allclose(result.model.weights, whole.model.weights, rtol=1e-9, atol=1e-12)
