"""A function over many parts: on workers that come and go, die and fall silent, with a bounded number in flight."""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, KilledWorker, LocalCluster, Scheduler, SpecCluster, Worker, get_worker

from daskcnn.cluster.link import client as connection
from daskcnn.cluster.link.calls import silent_among
from daskcnn.cluster.link.client import heed_signals
from daskcnn.cluster.link.leases import holding
from daskcnn.cluster.spread.part_queue import AHEAD, ATTEMPTS
from daskcnn.cluster.spread.spread import spread
from daskcnn.errors import ClusterError, DataError, Interrupted, Lost
from daskcnn.job.tables import Cluster, Workers
from tests.cluster.cluster_jobs import addresses_of

PARTS = range(40)


class OfThisProcess:
    """A function that stays in this process, and is not copied."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        _COPIES.append(self)
        return _copy, (len(_COPIES) - 1,)


_COPIES: list[OfThisProcess] = []


def _copy(number: int) -> OfThisProcess:
    return _COPIES[number]


@pytest.fixture
def cluster() -> Iterator[SpecCluster]:
    """Two workers, each with one slot for tasks and another that no task may have."""
    here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    options = {"nthreads": 2, "resources": {"CPU": 1}, "host": "127.0.0.1", "dashboard": False}
    workers = {f"cpu-{i}": {"cls": Worker, "options": options} for i in range(2)}
    with SpecCluster(workers=workers, scheduler={"cls": Scheduler, "options": here}, name="spread") as cluster:
        yield cluster
        while _LATE:
            cluster.sync(_LATE.pop().close)


@pytest.fixture
def client(cluster: SpecCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=30)
        yield client


def over(
    client: Client, work: Callable[[str, int], Any], parts: Iterable[int] = PARTS, **settings: Any
) -> Iterator[tuple[int, Any]]:
    def function(part: int, *, kind: str, threads: int) -> Any:
        assert (kind, threads) == ("cpu", 2)
        return work(str(get_worker().name), part)

    return spread(client, OfThisProcess(function), parts, Cluster(**settings), whole=True)


def test_without_a_client_parts_are_done_here_one_by_one() -> None:
    drawn = list[int]()

    def parts() -> Iterator[int]:
        for part in range(4):
            drawn.append(part)
            yield part

    results = spread(None, lambda part: part * part, parts())
    assert next(results) == (0, 0)
    assert drawn == [0]
    assert dict(results) == {1: 1, 2: 4, 3: 9}


def test_every_part_is_done_once_and_what_they_share_is_sent_once_to_each_worker(client: Client) -> None:
    done: list[int] = []
    before = len(_COPIES)

    def work(name: str, part: int) -> int:
        done.append(part)
        return part * part

    assert dict(over(client, work)) == {part: part * part for part in PARTS}
    assert sorted(done) == list(PARTS)
    assert len(_COPIES) - before <= 2


def test_every_thread_works_where_a_part_takes_just_one(client: Client) -> None:
    """The first four parts end when all are begun: two on each worker."""
    together = threading.Barrier(4)

    def work(part: int) -> int:
        if part < 4:
            together.wait(60)
        return -part

    assert dict(spread(client, OfThisProcess(work), PARTS)) == {part: -part for part in PARTS}


def test_a_slow_worker_gets_fewer_and_no_worker_more_than_a_few(client: Client) -> None:
    """One worker ends its first part when the other has done all that it does not hold."""
    last, others = threading.Event(), []
    drawn: list[int] = []

    def work(name: str, part: int) -> str:
        if name == "cpu-0":
            assert last.wait(60)
        else:
            others.append(part)
            if len(others) == len(PARTS) - AHEAD:
                last.set()
        return name

    def parts() -> Iterator[int]:
        for part in PARTS:
            drawn.append(part)
            yield part

    found: list[tuple[int, str]] = []
    most = 0
    for part, name in over(client, work, parts()):
        most = max(most, len(drawn) - len(found))
        found.append((part, name))
    assert sorted(part for part, _ in found) == list(PARTS)
    assert [name for _, name in found].count("cpu-0") == AHEAD
    assert most <= 2 * AHEAD


def test_the_parts_of_a_lost_worker_are_done_by_others(client: Client, cluster: SpecCluster) -> None:
    begun, gone = threading.Event(), threading.Event()

    def work(name: str, part: int) -> str:
        if name == "cpu-0":
            begun.set()
            gone.wait(60)
        return name

    found: dict[int, str] = {}
    for part, name in over(client, work):
        if not found:
            assert begun.wait(60)
            cluster.sync(cluster.workers["cpu-0"].close, executor_wait=False)
            gone.set()
        found[part] = name
    assert found.keys() == set(PARTS)
    assert list(found.values()).count("cpu-0") <= AHEAD


def test_a_worker_that_comes_later_helps(client: Client, cluster: SpecCluster) -> None:
    late = threading.Event()
    names = set()

    def work(name: str, part: int) -> str:
        if name == "late":
            late.set()
        elif part >= 2:
            assert late.wait(60)
        return name

    for part, name in over(client, work, range(12)):
        if part == 0:
            options = {"nthreads": 2, "resources": {"CPU": 1}, "name": "late", "dashboard": False}
            cluster.scale(len(cluster.worker_spec))  # nothing of Dask's own is on its way
            cluster.sync(_started, cluster, options)
        names.add(name)
    assert "late" in names


async def _started(cluster: SpecCluster, options: dict[str, Any]) -> None:
    _LATE.append(await Worker(cluster.scheduler_address, **options))


_LATE: list[Worker] = []


@pytest.mark.slow
def test_a_part_that_takes_workers_down_is_named(client: Client) -> None:
    def work(name: str, part: int) -> None:
        raise KilledWorker("part", SimpleNamespace(address=name), 0)  # as Dask says it of a task whose worker died

    with pytest.raises(Lost, match=f"7: {ATTEMPTS} workers were lost that had this part"):
        list(over(client, work, [7]))


def test_an_error_of_a_task_is_raised_as_it_is(client: Client) -> None:
    def work(name: str, part: int) -> int:
        if part == 5:
            raise DataError("chunk 5", "damaged", "make it again")
        return part

    with pytest.raises(DataError, match="chunk 5: damaged; make it again"):
        list(over(client, work))


def test_a_signal_is_heeded(client: Client) -> None:
    came: list[int] = []
    check = heed_signals(lambda: came[0] if came else None)
    results = spread(client, OfThisProcess(abs), PARTS, check=check)
    next(results)
    came.append(2)
    with pytest.raises(Interrupted):
        list(results)


def test_only_the_workers_asked_for_are_used(client: Client) -> None:
    names = {name for _, name in over(client, lambda name, part: name, workers=Workers(cpu=1))}
    assert len(names) == 1


def test_runs_that_train_on_the_workers_are_named_once(client: Client) -> None:
    """The caller's own lease is none to tell of, as of a job that has its images read."""
    names, told = addresses_of(client), list[str]()
    with (
        Client(client.scheduler.address, set_as_default=False) as other,
        holding(other, "night") as theirs,
        holding(client, "own") as own,
    ):
        assert theirs.take([names["cpu-0"]])
        assert own.take([names["cpu-1"]])
        assert len([*spread(client, operator.neg, PARTS, warn=told.append)]) == len(PARTS)
    (line,) = told
    assert line.startswith("run night (")
    assert " has cpu-0 since " in line
    assert line.endswith(": parts wait there for the end of a round, and rounds for parts")


def test_a_worker_that_is_there_for_the_server_is_given_no_work(client: Client, cluster: SpecCluster) -> None:
    cluster.scale(len(cluster.worker_spec))
    cluster.sync(_started, cluster, {"resources": {"PS": 1}, "name": "ps", "dashboard": False})
    client.wait_for_workers(3)
    names = {name for _, name in spread(client, OfThisProcess(lambda part: str(get_worker().name)), PARTS)}
    assert names <= {"cpu-0", "cpu-1"}


def test_no_worker_left(client: Client, cluster: SpecCluster) -> None:
    results = over(client, lambda name, part: name, wait=0.0)
    next(results)
    for worker in list(cluster.workers.values()):
        cluster.sync(worker.close)
    with pytest.raises(Lost, match="none is left, for 0 s"):
        list(results)


def test_no_worker_at_all(client: Client, cluster: SpecCluster) -> None:
    said: list[str] = []
    settings = Cluster(wait=0.0, workers=Workers(gpu=1))
    with pytest.raises(ClusterError, match="has no worker that computes, for 0 s; start one"):
        list(spread(client, abs, PARTS, settings, warn=said.append))
    assert said == ["no worker that computes is there; waiting 0 s for one"]


# --- processes ---


@pytest.fixture
def processes() -> Iterator[Client]:
    """Two workers of a thread each, whose nannies start them again."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def fatal_once(folder: Path, part: int) -> int:
    """End the process the first time that it is asked for 3."""
    mark = folder / "died"
    if part == 3 and not mark.exists():
        mark.touch()
        os._exit(1)
    return part


def fatal(part: int) -> int:
    """End the process that is asked for 3."""
    if part == 3:
        os._exit(1)
    return part


def process_of(part: int) -> int:
    """Take long enough for something to happen meanwhile."""
    time.sleep(0.05)  # the test waits for no result in this time: it only makes parts last
    return os.getpid()


@pytest.mark.cluster
@pytest.mark.slow
def test_the_parts_of_a_worker_that_dies_are_done_anew(processes: Client, tmp_path: Path) -> None:
    said: list[str] = []
    results = spread(processes, partial(fatal_once, tmp_path), PARTS, warn=said.append)
    assert sorted(part for _, part in results) == list(PARTS)
    assert any("is lost" in line for line in said)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_part_that_ends_every_process_is_named(processes: Client) -> None:
    with pytest.raises(Lost, match=f"{ATTEMPTS} workers were lost that had this part"):
        list(spread(processes, fatal, [3]))


@pytest.mark.cluster
@pytest.mark.slow
def test_the_parts_of_a_silent_worker_are_done_by_others_until_it_is_back(
    processes: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the scheduler still has it among its workers, and is asked in vain to send it something."""
    monkeypatch.setattr(connection, "silent_among", partial(silent_among, within=10.0))
    drawn, found, said, back = list[int](), list[int](), list[str](), threading.Event()

    def parts() -> Iterator[int]:
        while not back.is_set():
            drawn.append(len(drawn))
            yield drawn[-1]

    results = spread(processes, process_of, parts(), Cluster(stall_timeout=1.0), warn=said.append)
    first, stopped = next(results)
    os.kill(stopped, signal.SIGSTOP)
    for part, process in results:
        found.append(part)
        if said and process == stopped:
            back.set()
        elif said:
            os.kill(stopped, signal.SIGCONT)
    assert sorted([first, *found]) == drawn
    assert ["no answer, and no result for 1 s" in line for line in said] == [True]


@pytest.mark.cluster
@pytest.mark.slow
def test_work_goes_on_where_other_workers_have_taken_the_place_of_all(processes: Client) -> None:
    first = list(processes.run(os.getpid))
    results = spread(processes, process_of, range(60))
    found = [next(results)]
    processes.cluster.scale(3)
    processes.wait_for_workers(3)
    processes.retire_workers(first, close_workers=True)
    found += results
    assert sorted(part for part, _ in found) == list(range(60))
