"""Clusters that adapt by themselves: what they see of a job that waits, and whom they close."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from distributed import Client, LocalCluster

from daskcnn.cluster.link.calls import ask_scheduler
from daskcnn.cluster.link.demand import Demand
from daskcnn.cluster.link.lease_table import Holder
from daskcnn.cluster.link.leases import SchedulerLeases


def target(dask_scheduler: Any) -> int:
    return int(dask_scheduler.adaptive_target())


def until_asked_for(client: Client, workers: int) -> None:
    deadline = time.monotonic() + 20.0
    while (found := ask_scheduler(client, target)) != workers:
        assert time.monotonic() < deadline, f"{found} workers are asked for, not {workers}"


def test_a_job_that_waits_makes_demand_for_the_workers_that_are_missing() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        demand = Demand(client)
        for missing in (0, 3, 1, 4, 0):
            demand.set(missing)
            until_asked_for(client, missing)
        demand.set(2)
        until_asked_for(client, 2)
        demand.close()
        until_asked_for(client, 0)


def test_workers_that_a_run_has_are_not_closed() -> None:
    plugin = SchedulerLeases()
    one = Holder("a", "client", "run")
    plugin.table.take(one, {"tcp://1": "desk-1"}, 1.0)
    plugin.table.serve(one, {"tcp://2": "desk-2"}, 1.0)
    workers = [SimpleNamespace(address=f"tcp://{number}") for number in (1, 2, 3)]
    assert plugin.valid_workers_downscaling(None, workers) == workers[2:]
    plugin.table.client_gone("client")
    assert plugin.valid_workers_downscaling(None, workers) == workers
