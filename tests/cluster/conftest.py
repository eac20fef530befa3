"""A small data set on disk, and clusters of processes that tests share: whom one kills is back for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from daskcnn.store import prepare
from tests.cluster.cluster_jobs import local_cluster, wait_for_all


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
