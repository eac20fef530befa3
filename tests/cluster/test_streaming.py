"""A function over many items: on workers that come and go, with a bounded number in flight."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

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
