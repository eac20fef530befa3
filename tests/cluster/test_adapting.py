"""Jobs that ask their cluster for workers, and give them back."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster

from daskcnn import Stop
from daskcnn.cluster.link.members import present
from daskcnn.cluster.link.scaled import ScaledCluster
from daskcnn.cluster.worker.session import THROTTLE
from daskcnn.errors import ClusterError
from daskcnn.events import Event, WorkerJoined, WorkersAsked
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import train_job
from tests.cluster.cluster_jobs import small_job

pytestmark = pytest.mark.cluster


def test_a_run_asks_for_a_worker_that_pays_and_gives_it_back_in_the_end(
    synthetic: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THROTTLE, "2")
    train = {"strategy": "sgwu", "epochs": 2000}
    job = small_job(synthetic, runs, train=train, cluster={"workers": {"cpu": "1..2"}, "adapt": True})
    seen: list[Event] = []

    def until_the_second_trains(event: Event) -> None:
        seen.append(event)
        if isinstance(event, WorkerJoined):
            raise Stop

    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        result = train_job(resolve(job), client=client, on_event=until_the_second_trains)
        assert result.summary["status"] == "stopped"
        (asked,) = (event for event in seen if isinstance(event, WorkersAsked))
        assert (asked.workers, asked.wanted) == (1, 2)
        deadline = time.monotonic() + 20.0
        while cluster.plan or present(client):
            assert time.monotonic() < deadline, "it has them still"
            time.sleep(0.05)


def test_a_cluster_that_cannot_be_asked_is_refused_before_anything_starts(synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, cluster={"workers": {"cpu": "1..2"}, "adapt": True})
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster.scheduler_address, set_as_default=False) as client,
    ):
        with pytest.raises(ClusterError, match="no cluster object that could be asked") as told:
            train_job(resolve(job), client=client)
        assert "Client(cluster)" in told.value.remedy
    job["cluster"]["scheduler"] = "tcp://127.0.0.1:1"
    with pytest.raises(ClusterError, match="an address cannot be asked for workers"):
        train_job(resolve(job))
    assert not any(Path(runs).glob("*"))


class Elsewhere:
    """A cluster that starts its workers elsewhere and ends those that it chooses, as the operator of Kubernetes."""

    def __init__(self, *names: str, fault: str = "") -> None:
        there = ({"name": name, "resources": {name.upper(): 1}} for name in names)
        self.scheduler_info = {"workers": {f"tcp://{worker['name']}": worker for worker in there}}
        self.observed, self.asked, self._fault = {*names}, list[int](), fault

    def scale(self, n: int) -> None:
        if self._fault:
            raise OSError(self._fault)
        self.asked.append(n)


def scaled(cluster: Elsewhere) -> ScaledCluster:
    client: Any = SimpleNamespace(cluster=cluster)
    return ScaledCluster(client, own=True)


def test_a_cluster_that_chooses_itself_is_told_numbers() -> None:
    """The worker that is set apart for the server is of another group of workers."""
    cluster = Elsewhere("a", "b", "ps")
    there = scaled(cluster)
    there.ask(2)
    there.give_back("tcp://b", "b")
    there.close()
    assert cluster.asked == [4, 1]


def test_what_goes_wrong_is_told() -> None:
    there = scaled(Elsewhere("a", fault="no quota"))
    there.ask(2)
    there.close()
    assert there.faults.get(timeout=5) == "Elsewhere: 2 more workers: OSError: no quota"
