"""Clusters that adapt by themselves: what they see of a job that waits, and whom they close."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster

from daskcnn.cluster.link import leases
from daskcnn.cluster.link.calls import ask_scheduler
from daskcnn.cluster.link.demand import Demand
from daskcnn.cluster.link.lease_table import Holder
from daskcnn.cluster.link.leases import SchedulerLeases
from daskcnn.cluster.link.leaving import RETIRING


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


class OneScheduler:
    """A scheduler of three workers."""

    def __init__(self) -> None:
        self.workers = {f"tcp://{number}": SimpleNamespace(name=f"desk-{number}") for number in (1, 2, 3)}
        self.told: list[Any] = []
        self.retired: list[dict[str, Any]] = []
        self.handlers = {"retire_workers": self.retire_workers}

    def log_event(self, topic: str, message: Any) -> None:
        self.told.append((topic, message))

    async def retire_workers(self, **options: Any) -> str:
        self.retired.append(options)
        return "retired"


@pytest.mark.parametrize("asked", [{"workers": ["tcp://1", "tcp://2"]}, {"names": ["desk-1", "desk-2"]}])
def test_a_worker_of_a_run_is_retired_once_the_run_has_let_it_go(asked: dict[str, Any]) -> None:
    async def course() -> None:
        scheduler: Any = OneScheduler()
        plugin = SchedulerLeases(scheduler)
        plugin.table.take(Holder("a", "client", "run"), {"tcp://1": "desk-1", "tcp://3": "desk-3"}, 1.0)
        plugin.table.serve(Holder("a", "client", "run"), {"tcp://2": "desk-2"}, 1.0)
        retiring = asyncio.ensure_future(scheduler.handlers["retire_workers"](**asked, remove=True))
        for _ in range(3):
            await asyncio.sleep(0.03)
        assert scheduler.told == [(RETIRING, {"workers": ["tcp://1"]})]
        assert scheduler.retired == []
        plugin.table.release("a", ["tcp://1"])
        assert await retiring == "retired"
        assert scheduler.retired == [{**asked, "remove": True}]

    asyncio.run(course())


@pytest.mark.parametrize("asked", [{"workers": ["tcp://2"]}, {"n": 1, "minimum": 2}])
def test_workers_of_no_run_are_retired_at_once(asked: dict[str, Any]) -> None:
    scheduler: Any = OneScheduler()
    SchedulerLeases(scheduler)
    assert asyncio.run(scheduler.handlers["retire_workers"](**asked)) == "retired"
    assert (scheduler.told, scheduler.retired) == ([], [asked])


def test_a_run_that_does_not_let_a_worker_go_holds_it_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LET_GO", 0.05)
    scheduler: Any = OneScheduler()
    SchedulerLeases(scheduler).table.take(Holder("a", "client", "run"), {"tcp://1": "desk-1"}, 1.0)
    assert asyncio.run(scheduler.handlers["retire_workers"](workers=["tcp://1"])) == "retired"


def test_workers_that_a_run_has_are_not_closed() -> None:
    plugin = SchedulerLeases()
    one = Holder("a", "client", "run")
    plugin.table.take(one, {"tcp://1": "desk-1"}, 1.0)
    plugin.table.serve(one, {"tcp://2": "desk-2"}, 1.0)
    workers = [SimpleNamespace(address=f"tcp://{number}") for number in (1, 2, 3)]
    assert plugin.valid_workers_downscaling(None, workers) == workers[2:]
    plugin.table.client_gone("client")
    assert plugin.valid_workers_downscaling(None, workers) == workers
