"""A function over many items: on workers that come and go, with a bounded number in flight."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, get_worker

from daskcnn.cluster.streaming import AHEAD, stream
from daskcnn.errors import DataError


def square(number: int) -> int:
    """What the tests have computed."""
    return number * number


def picky(number: int) -> int:
    """Refuses 7."""
    if number == 7:
        raise DataError("7", "is not liked", "give another")
    return number


def fatal_once(item: tuple[str, int]) -> int:
    """Ends its process the first time that it is asked for 3."""
    folder, number = item
    mark = Path(folder, "died")
    if number == 3 and not mark.exists():
        mark.touch()
        os._exit(1)
    return number


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two threads in this process."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_without_a_client_items_are_done_here_one_by_one() -> None:
    drawn = list[int]()

    def items() -> Iterator[int]:
        for number in range(4):
            drawn.append(number)
            yield number

    results = stream(None, square, items())
    assert next(results) == (0, 0)
    assert drawn == [0]
    assert dict(results) == {1: 1, 2: 4, 3: 9}


def test_every_item_once(client: Client) -> None:
    assert sorted(stream(client, square, range(40))) == [(n, n * n) for n in range(40)]


def test_no_more_are_drawn_than_are_worked_on(client: Client) -> None:
    drawn, most = [0], 0

    def items() -> Iterator[int]:
        for number in range(60):
            drawn[0] += 1
            yield number

    for done, _ in enumerate(stream(client, square, items())):
        most = max(most, drawn[0] - done)
    assert most <= 2 * AHEAD + 1


def test_what_the_function_raises_is_raised(client: Client) -> None:
    with pytest.raises(DataError, match="7: is not liked"):
        list(stream(client, picky, range(20)))


def test_a_check_ends_it(client: Client) -> None:
    calls = threading.Semaphore(5)

    def check() -> None:
        if not calls.acquire(blocking=False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(stream(client, square, range(10_000), check=check))


@pytest.mark.cluster
@pytest.mark.slow
def test_an_item_whose_worker_is_lost_is_done_by_another(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as there,
    ):
        found = sorted(n for _, n in stream(there, fatal_once, [(str(tmp_path), n) for n in range(12)]))
    assert found == list(range(12))


def slowly(number: int) -> int:
    """Takes long enough for a worker to be stopped meanwhile."""
    time.sleep(0.05)
    return number


@pytest.mark.cluster
@pytest.mark.slow
def test_work_goes_on_where_other_workers_have_taken_the_place_of_all() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as there,
    ):
        results = stream(there, slowly, range(40))
        found = [next(results)[1]]
        cluster.scale(2)
        there.wait_for_workers(2)
        there.retire_workers([next(iter(cluster.scheduler_info["workers"]))], close_workers=True)
        found += [number for _, number in results]
    assert sorted(found) == list(range(40))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_worker_that_is_there_for_the_server_is_given_no_work() -> None:
    resources = {"train": {"CPU": 1}, "ps": {"PS": 1}}
    workers = {
        name: {"cls": Nanny, "options": {"nthreads": 1, "resources": given}} for name, given in resources.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0"}}
    with SpecCluster(workers=workers, scheduler=scheduler) as cluster, Client(cluster) as there:
        there.wait_for_workers(2)
        names = {name for _, name in stream(there, where, range(30))}
    assert names == {"train"}


def where(number: int) -> str:
    """Takes a moment, and names the worker."""
    time.sleep(0.02)
    return str(get_worker().name)
