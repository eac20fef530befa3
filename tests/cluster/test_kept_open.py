"""A scheduler that closes when it is idle, under a job that waits."""

from __future__ import annotations

import inspect
import time
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster

from daskcnn.cluster.link.kept_open import kept_open
from daskcnn.cluster.run.admission import check_scheduler
from daskcnn.errors import ClusterError
from tests.fake_client import fake_client

IDLE = 0.5  # seconds until it closes


def test_a_scheduler_does_not_close_for_being_idle_while_a_job_waits_and_does_so_later() -> None:
    options = {"n_workers": 0, "processes": False, "dashboard_address": "127.0.0.1:0", "protocol": "inproc://"}
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),  # a cluster that ends asks for its scheduler
        LocalCluster(**options, scheduler_kwargs={"idle_timeout": f"{IDLE} s"}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with kept_open(client):
            time.sleep(3 * IDLE)  # the length of the wait is the test's subject
            assert cluster.scheduler.status.name == "running"
        deadline = time.monotonic() + 60
        while cluster.scheduler.status.name == "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_scheduler_without_this_package_is_told_by_the_look_at_its_versions() -> None:
    async def run(function: Any, **_: Any) -> Any:
        if not inspect.isfunction(function):
            raise ModuleNotFoundError("No module named 'daskcnn'")  # as it reads a function that goes by its name
        return function() | {"daskcnn": "missing"}

    with (
        fake_client({}, run_on_scheduler=run) as client,
        pytest.raises(ClusterError, match="does not have daskcnn"),
        kept_open(client) as kept,
    ):
        check_scheduler(kept)
