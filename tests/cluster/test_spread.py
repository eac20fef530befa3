"""Items over workers of a cluster in this process: all are done, a few at a time, and again where a worker is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, KilledWorker, Scheduler, SpecCluster, Worker, get_worker

from daskcnn.cluster.connection import Connection
from daskcnn.cluster.spread import ATTEMPTS, DEPTH, Spread
from daskcnn.errors import DataError, Interrupted, Lost
from daskcnn.job.tables import Cluster, Workers

ITEMS = range(40)


@pytest.fixture
def cluster() -> Iterator[SpecCluster]:
    """Two workers, each with one slot for tasks and another that no task may have."""
    here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    options = {"nthreads": 2, "resources": {"CPU": 1}, "host": "127.0.0.1", "dashboard": False}
    workers = {f"cpu-{i}": {"cls": Worker, "options": options} for i in range(2)}
    with SpecCluster(workers=workers, scheduler={"cls": Scheduler, "options": here}, name="spread") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: SpecCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=30)
        yield client


class Desk:
    """What items are done on: a function of the worker's name. It stays in this process, and is not copied."""

    def __init__(self, work: Callable[[str, int], Any]) -> None:
        self.work = work

    def __reduce__(self) -> tuple[Any, ...]:
        _DESKS.append(self)
        return _desk, (len(_DESKS) - 1,)


_DESKS: list[Desk] = []


def _desk(number: int) -> Desk:
    return _DESKS[number]


def do(desk: Desk, item: int, kind: str, threads: int) -> Any:
    assert (kind, threads) == ("cpu", 2)
    return desk.work(str(get_worker().name), item)


def spread(client: Client, work: Callable[[str, int], Any], **settings: Any) -> Spread[int]:
    connection = Connection(client, lambda: None)
    return Spread(connection, Cluster(**settings), "item", do, Desk(work), lambda _: None)


def test_every_item_is_done_once(client: Client) -> None:
    done: list[int] = []

    def work(name: str, item: int) -> int:
        done.append(item)
        return item * item

    assert dict(spread(client, work).over(ITEMS)) == {item: item * item for item in ITEMS}
    assert sorted(done) == list(ITEMS)


def test_a_slow_worker_gets_fewer_and_no_worker_more_than_a_few(client: Client) -> None:
    """One worker ends its first item when the other has done all that it does not hold."""
    last, others = threading.Event(), []
    most: list[int] = []

    def work(name: str, item: int) -> str:
        if name == "cpu-0":
            assert last.wait(60)
        else:
            others.append(item)
            if len(others) == len(ITEMS) - DEPTH:
                last.set()
        return name

    spreading = spread(client, work)
    found = []
    for item, name in spreading.over(ITEMS):
        found.append((item, name))
        most += [len(seat.under_way) for seat in spreading._seats.values()]
    assert sorted(item for item, _ in found) == list(ITEMS)
    assert [name for _, name in found].count("cpu-0") == DEPTH
    assert max(most) <= DEPTH


def test_the_items_of_a_lost_worker_are_done_by_others(client: Client, cluster: SpecCluster) -> None:
    begun, gone = threading.Event(), threading.Event()

    def work(name: str, item: int) -> str:
        if name == "cpu-0":
            begun.set()
            gone.wait(60)
        return name

    found: dict[int, str] = {}
    for item, name in spread(client, work).over(ITEMS):
        if not found:
            assert begun.wait(60)
            cluster.sync(cluster.workers["cpu-0"].close, executor_wait=False)
            gone.set()
        found[item] = name
    assert found.keys() == set(ITEMS)
    assert list(found.values()).count("cpu-0") <= DEPTH


def test_a_worker_that_comes_later_helps(client: Client, cluster: SpecCluster) -> None:
    late = threading.Event()
    names = set()

    def work(name: str, item: int) -> str:
        if name == "late":
            late.set()
        elif item >= 2:
            assert late.wait(60)
        return name

    for item, name in spread(client, work).over(range(12)):
        if item == 0:
            options = {"nthreads": 2, "resources": {"CPU": 1}, "name": "late", "dashboard": False}
            cluster.scale(len(cluster.worker_spec))  # nothing of Dask's own is on its way
            cluster.sync(_started, cluster, options)
        names.add(name)
    assert "late" in names


async def _started(cluster: SpecCluster, options: dict[str, Any]) -> None:
    _LATE.append(await Worker(cluster.scheduler_address, **options))


_LATE: list[Worker] = []


@pytest.fixture(autouse=True)
def late_ones_go(cluster: SpecCluster) -> Iterator[None]:
    yield
    while _LATE:
        cluster.sync(_LATE.pop().close)


def test_an_item_that_takes_workers_down_is_named(client: Client) -> None:
    def work(name: str, item: int) -> None:
        raise KilledWorker("item", SimpleNamespace(address=name), 0)  # as Dask says it of a task whose worker died

    with pytest.raises(Lost, match=f"7: {ATTEMPTS} workers were lost that had this part"):
        list(spread(client, work).over([7]))


def test_an_error_of_a_task_is_raised_as_it_is(client: Client) -> None:
    def work(name: str, item: int) -> int:
        if item == 5:
            raise DataError("chunk 5", "damaged", "make it again")
        return item

    with pytest.raises(DataError, match="chunk 5: damaged; make it again"):
        list(spread(client, work).over(ITEMS))


def test_a_signal_is_heeded(client: Client) -> None:
    came: list[int] = []
    connection = Connection(client, lambda: came[0] if came else None)
    spreading = Spread(connection, Cluster(), "item", do, Desk(lambda name, item: item), lambda _: None).over(ITEMS)
    next(spreading)
    came.append(2)
    with pytest.raises(Interrupted):
        list(spreading)


def test_only_the_workers_asked_for_are_used(client: Client) -> None:
    names = {name for _, name in spread(client, lambda name, item: name, workers=Workers(cpu=1)).over(ITEMS)}
    assert len(names) == 1


def test_no_worker_left(client: Client, cluster: SpecCluster) -> None:
    spreading = spread(client, lambda name, item: name, wait=0.0).over(ITEMS)
    next(spreading)
    for worker in list(cluster.workers.values()):
        cluster.sync(worker.close)
    with pytest.raises(Lost, match="none is left, for 0 s"):
        list(spreading)
