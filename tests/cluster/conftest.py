"""A small data set on disk, and clusters of processes that tests share while nothing on them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_jobs import local_cluster
from distributed import Client

from daskcnn.cluster import layer_sharded
from daskcnn.store import prepare


@pytest.fixture(autouse=True)
def free_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that train in seconds are not worth any transfer: shares go by computing alone here."""
    monkeypatch.setattr(layer_sharded, "measure_links", lambda context, home: {})


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
def three_workers() -> Iterator[Client]:
    """Three CPU workers and one for the server; a test that kills starts its own."""
    with local_cluster(3) as client:
        yield client
