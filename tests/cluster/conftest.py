"""A small data set on disk, and clusters of processes that tests share: whom one kills is back for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from distributed import Client

from daskcnn.launch.training import Result
from daskcnn.store import prepare
from tests.cluster.cluster_jobs import Watch, local_cluster, run, small_job, wait_for_all

RuleRuns: TypeAlias = Callable[[str], tuple[Result, Watch, dict[str, Any]]]
"""A run of three workers by this update rule: its result, what was logged, its job."""
SEVERAL_MEETINGS: dict[str, dict[str, Any]] = {
    "bsp": {"every": 5},
    "easgd": {"tau": 3},
    "downpour": {"n_push": 2, "n_fetch": 3},
    "dc-asgd": {"every": 3},
    "admm": {"every": 4, "rho": 0.1},
    "parallel-sgd": {"rounds": 4},
    "local-sgd": {"every": 3},
}
HALVED = ("agwu", "easgd", "admm")
"""Rules whose runs travel in half precision."""


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


@pytest.fixture(scope="session")
def rule_runs(_three_workers: Client, synthetic: str, tmp_path_factory: pytest.TempPathFactory) -> RuleRuns:
    """One run by each rule, made when it is first asked for. BSP's allocation does not depend on what is measured."""

    @cache
    def made(strategy: str) -> tuple[Result, Watch, dict[str, Any]]:
        train = {"strategy": strategy, "epochs": 4, "partition": "udpa" if strategy == "bsp" else "idpa"}
        if strategy in ("downpour", "dc-asgd"):  # what three replicas with momentum have accrued is added up
            train["lr"] = 0.003
        rule, cluster = SEVERAL_MEETINGS.get(strategy, {}), {"wire": "float16" if strategy in HALVED else "float32"}
        runs, watch = str(tmp_path_factory.mktemp("rules")), Watch()
        job = small_job(synthetic, runs, train=train, data={"limit": 1300}, rule=rule, cluster=cluster)
        wait_for_all(_three_workers, 4)
        return run(_three_workers, job, watch), watch, job

    return made
