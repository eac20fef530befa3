"""What threads tell each other without the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from daskcnn.compiled import loop, signals
from daskcnn.compiled.loop import step_aside

LONG = 2_000_000_000
"""Turns of a minute."""


@pytest.fixture
def numbers() -> np.ndarray:
    return np.zeros(16, np.int64)


def at(numbers: np.ndarray, i: int) -> int:
    return int(numbers.ctypes.data) + 8 * i


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_watching_ends_with_a_change(numbers: np.ndarray) -> None:
    thread, results = in_thread(lambda: signals.watch(at(numbers, 0), 0, LONG))
    signals.call(at(numbers, 0), 0)
    thread.join(timeout=60)
    assert results == [True]
    assert list(numbers[:2]) == [1, 0]


def test_watching_ends_without_a_change(numbers: np.ndarray) -> None:
    assert not signals.watch(at(numbers, 0), 0, 100)
    assert signals.watch(at(numbers, 0), 1, 0) is False  # it did not look


def test_who_has_ended_says_so_before_it_watches(numbers: np.ndarray) -> None:
    thread, results = in_thread(lambda: signals.end_and_watch(at(numbers, 8), at(numbers, 0), 0, LONG))
    assert signals.watch(at(numbers, 8), 0, LONG)
    signals.call(at(numbers, 0), 0)
    thread.join(timeout=60)
    assert results == [True]


def test_nothing_added_at_once_is_lost(numbers: np.ndarray) -> None:
    def add() -> None:
        for _ in range(5_000):
            signals.call(at(numbers, 0), 0)

    threads = [in_thread(add)[0] for _ in range(4)]
    for thread in threads:
        thread.join(timeout=60)
    assert numbers[0] == 20_000


def test_a_thread_comes_back_although_another_one_stays_in_the_interpreter(numbers: np.ndarray) -> None:
    """One that sleeps there without a word delays others; it does not hold them for ever."""
    for _ in range(3):
        thread, _ = in_thread(lambda: signals.watch(at(numbers, 0), 0, 1))
        thread.join(timeout=60)
        loop._TURN[0] = 1  # as if it slept there
        assert not signals.watch(at(numbers, 0), 0, 10)
    assert loop._TURN[0] == 1
    step_aside()
    assert loop._TURN[0] == 0
