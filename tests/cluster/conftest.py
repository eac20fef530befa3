"""A small data set on disk, and clusters of processes that tests share: whom one kills is back for the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Client

from daskcnn.cluster.layers import balance as layer_balance
from daskcnn.cluster.layers import driver as layer_sharded
from daskcnn.cluster.layers import graph as layer_graph
from daskcnn.cluster.run_context import RunContext
from daskcnn.sharded import ShareSearch, Stage, WorkerLinks
from daskcnn.store import prepare
from tests.cluster.cluster_jobs import local_cluster, wait_for_all


@pytest.fixture(autouse=True)
def free_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that train in seconds are not worth a transfer, or what any shard takes: shares go by eq. 1 here."""
    monkeypatch.setattr(layer_sharded, "measure_links", lambda context, home: WorkerLinks())
    for module in (layer_sharded, layer_graph):
        monkeypatch.setattr(module, "balance_of", _by_size_alone)


def _by_size_alone(context: RunContext, stages: Sequence[Stage], home: str) -> ShareSearch:
    for name, own in context.calibrations.items():
        context.calibrations[name] = replace(own, conv_fixed={})
    return layer_balance.balance_of(context, stages, home)


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the prepared built-in data set."""
    path = tmp_path_factory.mktemp("data") / "synthetic.zarr"
    prepare("synthetic", out=path)
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """Folder for the runs of a test."""
    return str(tmp_path / "runs")


@pytest.fixture(scope="session")
def _three_workers() -> Iterator[Client]:
    with local_cluster(3) as client:
        yield client


@pytest.fixture
def three_workers(_three_workers: Client) -> Iterator[Client]:
    """Three CPU workers and one for the server. A job on fewer of them says so."""
    yield _three_workers
    wait_for_all(_three_workers, 4)
