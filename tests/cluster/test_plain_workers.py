"""Workers that advertise no resource of ours, as a notebook's `Client(LocalCluster())` has them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, default_client
from threadpoolctl import threadpool_info, threadpool_limits

import daskcnn
from daskcnn.arrays import single_threaded_blas
from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.members import Member, advertised, chosen, taken_as_cpu
from daskcnn.cluster.run.workers import RunWorkers
from daskcnn.cluster.worker import session
from daskcnn.events import Event, LinkSpeeds, StrategyChosen, Warned, WorkerIgnored, WorkerLeftOut
from daskcnn.job.tables import LAYER, Workers
from daskcnn.launch.training import Result
from daskcnn.ps import RULES
from daskcnn.ps.average import TRAINED
from daskcnn.runs.checkpoint import latest
from daskcnn.runs.directory import RunDirectory
from tests.tiny_runs import tiny_data, tiny_job

LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 2},
    {"layer": "conv", "kernels": 8, "size": 3, "pad": 1},
    {"layer": "dense", "units": 10},
]


def there(**resources: dict[str, float]) -> dict[str, Any]:
    """What the scheduler says of workers that advertise this."""
    return {
        f"tcp://{name}": {"name": name, "host": "here", "nthreads": 2, "resources": r} for name, r in resources.items()
    }


def kinds(found: list[Member]) -> dict[str, str]:
    return {member.name: member.kind for member in found}


def test_workers_are_cpu_workers_where_none_advertises_cpu_or_gpu() -> None:
    found = advertised(there(a={}, b={"MEMORY": 1e9}))
    assert kinds(found) == {"a": "cpu", "b": "cpu"}
    assert [member.resource for member in found] == [{}, {}]
    (line,) = taken_as_cpu(found)
    assert line.startswith("no worker advertises CPU or GPU: 2 workers are taken as CPU workers; ")
    assert "\n" not in line


def test_a_worker_for_the_server_says_nothing_of_the_others() -> None:
    members = chosen(advertised(there(a={}, s={"PS": 1})), Workers())
    assert ([m.plain for m in members.workers], members.server.resource, members.server_alone) == (
        [True],
        {"PS": 1},
        True,
    )


def test_a_task_takes_all_of_a_worker_s_resource() -> None:
    """With a part of it Dask would run several tasks at once, which share the worker's replica."""
    found = advertised(there(a={"CPU": 4}, b={"GPU": 1, "CPU": 2}, s={"PS": 2.5}))
    assert {member.name: member.resource for member in found} == {"a": {"CPU": 4}, "b": {"CPU": 2}, "s": {"PS": 2.5}}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_workers_without_are_left_alone_where_others_advertise(kind: str) -> None:
    found = advertised(there(a={}, b={kind.upper(): 1}))
    assert kinds(found) == {"b": kind}
    assert taken_as_cpu(found) == ()


class Scheduler(Connection):
    """Knows these workers."""

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(SimpleNamespace(scheduler_comm=None), lambda: None)
        self.known = known

    def workers(self) -> dict[str, dict[str, Any]]:
        return self.known


@pytest.mark.parametrize(("first", "second"), [({}, {}), ({"CPU": 1}, {"CPU": 1}), ({}, {"CPU": 1})])
def test_a_newcomer_is_taken_if_it_is_like_the_others(first: dict[str, float], second: dict[str, float]) -> None:
    events: list[Event] = []
    scheduler = Scheduler(there(a=first))
    workers = RunWorkers(scheduler, chosen(advertised(scheduler.known), Workers()), events.append)
    scheduler.known = there(a=first, b=second)
    workers.look_round()
    assert kinds(workers.newcomers) == {"b": "cpu"}


def test_a_newcomer_without_is_no_news_where_the_others_advertise() -> None:
    events: list[Event] = []
    scheduler = Scheduler(there(a={"CPU": 1}))
    workers = RunWorkers(scheduler, chosen(advertised(scheduler.known), Workers()), events.append)
    scheduler.known = there(a={"CPU": 1}, b={})
    workers.look_round()
    assert (workers.newcomers, [e for e in events if isinstance(e, WorkerIgnored)]) == ([], [])


def test_tasks_of_one_worker_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(session, "get_worker", lambda: SimpleNamespace(address=here.address))
    at_work: dict[str, int] = {"a": 0, "b": 0}
    most: dict[str, int] = {"a": 0, "b": 0}
    together = threading.Barrier(2, timeout=20)

    def task(worker: str) -> None:
        at_work[worker] += 1
        most[worker] = max(most[worker], at_work[worker])
        together.wait()  # with a task of the other worker: two of one worker would never let the others in
        time.sleep(0.01)  # long enough for a second task of this worker to come in, if it could
        at_work[worker] -= 1

    def run(worker: str) -> None:
        here.address = worker
        session.in_turn(task, worker)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, "abababab"))
    assert most == {"a": 1, "b": 1}


def overlap() -> None:
    """In a process of its own: threads of other tests' workers set the number of threads too."""

    def threads() -> set[int]:
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with single_threaded_blas():
            inside.set()
            go_on.wait(20)

    before = threads()
    threadpool_limits(2, "blas")
    with threadpool_limits(2, "blas"):
        pass  # at the end of a context any thread may set the number
    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(20)
    with single_threaded_blas():
        go_on.set()
        thread.join()
        assert threads() == {1}
    assert threads() == {2}
    threadpool_limits(*before, "blas")


@pytest.mark.slow
def test_threads_that_overlap_leave_blas_as_it_was() -> None:
    script = "from tests.cluster.test_plain_workers import overlap; overlap()"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True, timeout=60)


# --- runs on a cluster whose workers advertise nothing ---


def cluster(workers: int, threads: int, *, processes: bool) -> LocalCluster:
    return LocalCluster(
        n_workers=workers, threads_per_worker=threads, processes=processes, dashboard_address=":0", silence_logs="ERROR"
    )


@pytest.fixture(scope="module")
def one_process() -> Iterator[Client]:
    """Two workers of two threads each, all in this process."""
    with cluster(2, 2, processes=False) as there, Client(there, set_as_default=False) as client:
        yield client


def trained(client: Client, folder: Path, strategy: str, *, ema: float | None = None, **cluster: Any) -> Result:
    data = tiny_data(folder, train=200)
    train: dict[str, Any] = {"epochs": 2, "batch_size": 20, "strategy": strategy, "threads": 1}
    train |= {} if ema is None else {"ema": ema, "partition": "udpa"}
    if strategy == "groups":
        train |= {"strategy": "bsp", "replica_size": 2}
    if strategy in (LAYER, "groups"):
        train["kernel_shares"] = "speeds"
    model = {"layers": LAYERS, "dtype": "float64"}
    job = tiny_job(data, train=train, cluster={"settle": 0.0, **cluster}, run={"dir": str(folder / "runs")})
    return daskcnn.train(client, job | {"model": model})


STRATEGIES = [*(name for name, rule in RULES.items() if not rule.chooses_workers), LAYER, "groups"]


def check(result: Result) -> None:
    assert result.summary["status"] == "done"
    assert min(w["samples"] for w in result.summary["workers"]) > 0
    messages = [e.message for e in RunDirectory.open(result.run).events() if isinstance(e, Warned)]
    assert sum("2 workers are taken as CPU workers" in (m or "") for m in messages) == 1


@pytest.mark.parametrize("strategy", ["bsp", "agwu", LAYER, "groups"])
def test_a_cluster_in_one_process_trains(one_process: Client, tmp_path: Path, strategy: str) -> None:
    check(trained(one_process, tmp_path, strategy))


def test_two_workers_of_one_process_have_a_replica_each(one_process: Client, tmp_path: Path) -> None:
    """Kernels that are sharded over both come to what one process makes of the job; a shared replica would not."""
    from tests.cluster.references import reference

    result = trained(one_process, tmp_path, LAYER)
    path = str(tmp_path / "synthetic.zarr")
    alone = reference(
        tiny_job(path, train={"epochs": 2, "batch_size": 20, "threads": 1})
        | {"model": {"layers": LAYERS, "dtype": "float64"}}
    )
    np.testing.assert_allclose(result.model.vector, alone.weights, rtol=1e-9, atol=1e-12)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_notebook_s_cluster_trains(tmp_path: Path, strategy: str) -> None:
    with cluster(2, 2, processes=True) as there, Client(there, set_as_default=False) as client:
        check(trained(client, tmp_path, strategy))


@pytest.mark.cluster
@pytest.mark.slow
def test_auto_measures_links_chooses_and_trains(tmp_path: Path) -> None:
    with cluster(2, 2, processes=True) as there, Client(there, set_as_default=False) as client:
        result = trained(client, tmp_path, "auto")
    events = [*RunDirectory.open(result.run).events()]
    links, *_ = [event for event in events if isinstance(event, LinkSpeeds)]  # more where one is measured again
    assert [own.name for own in links.workers] == ["cpu-0", "cpu-1"]
    assert all(1e6 < (own.bandwidth or 0) < 1e12 and 0 < own.latency < 1 for own in links.workers)
    chosen = {name for event in events if isinstance(event, StrategyChosen) for name in event.candidates[0].samples}
    left_out = {event.worker for event in events if isinstance(event, WorkerLeftOut)}
    assert chosen | left_out == {"cpu-0", "cpu-1"}
    assert {row["name"] for row in result.summary["workers"] if row["samples"]} <= chosen
    assert result.summary["status"] == "done"


def test_a_split_server_averages_the_center_as_a_whole_one_does(one_process: Client, tmp_path: Path) -> None:
    """The average is the run's network, and beside it in the last checkpoint is the center that was trained."""
    folders = [tmp_path / "whole", tmp_path / "split"]
    for folder in folders:
        folder.mkdir()
    found = [trained(one_process, folder, "sgwu", ema=0.5, ps_shards=n) for n, folder in enumerate(folders, 1)]
    for result in found:
        check(result)
        kept = latest(result.run / "checkpoints", warn=warnings.warn)
        assert kept is not None
        center = kept.arrays[f"rule:{TRAINED}"]
        assert center.shape == result.model.vector.shape
        assert np.abs(center - result.model.vector).max() > 1e-6


def default() -> tuple[Client | None, Any]:
    """The default client, as other tests of the process may have one, and the scheduler of Dask's settings."""
    try:
        return default_client(), dask.config.get("scheduler", None)
    except ValueError:
        return None, dask.config.get("scheduler", None)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_on_workers_of_this_process_leaves_no_default_client(
    one_process: Client, tmp_path: Path, shards: int
) -> None:
    before = default()
    trained(one_process, tmp_path, "bsp", ps_shards=shards)
    assert default() == before


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_goes_on_its_own_cluster_whichever_is_the_default_one(
    one_process: Client, tmp_path: Path, shards: int
) -> None:
    with cluster(1, 1, processes=False) as other, Client(other, set_as_default=True) as default:
        check(trained(one_process, tmp_path, "bsp", ps_shards=shards))
        assert default_client() is default
