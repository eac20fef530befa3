"""The inner layer's tasks: order, priority, failures, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from daskcnn.pool import Pool, Task, _Graph

THREADS = pytest.mark.parametrize("threads", [1, 2, 5])


@st.composite
def graphs(draw: Any) -> list[list[int]]:
    """For every task those it comes after, all with smaller numbers."""
    sizes = draw(st.integers(0, 12))
    return [draw(st.lists(st.integers(0, i - 1), unique=True, max_size=3)) if i else [] for i in range(sizes)]


def tasks_of(graph: list[list[int]], work: Callable[[int], Any]) -> list[Task]:
    tasks: list[Task] = []
    for i, before in enumerate(graph):
        tasks.append(Task(partial(work, i), tuple(tasks[b] for b in before)))
    return tasks


@THREADS
@settings(max_examples=40, deadline=None)
@given(graph=graphs())
def test_every_task_runs_once_and_after_those_it_depends_on(threads: int, graph: list[list[int]]) -> None:
    pool, done, lock = Pool(threads), [], threading.Lock()

    def work(i: int) -> None:
        assert all(b in done for b in graph[i])
        with lock:
            done.append(i)

    pool.run(tasks_of(graph, work))
    pool.close()
    assert sorted(done) == list(range(len(graph)))


def test_first_levels_go_first_in_the_order_given() -> None:
    done: list[str] = []
    a, b = Task(lambda: done.append("a")), Task(lambda: done.append("b"))
    after_a = Task(lambda: done.append("after a"), (a,))
    last = Task(lambda: done.append("last"), (after_a, b))
    Pool(1).run([last, a, after_a, b])
    assert done == ["a", "b", "after a", "last"]
    assert [t.level for t in (a, b, after_a, last)] == [0, 0, 1, 2]


@THREADS
def test_a_failure_is_raised_and_ends_the_graph(threads: int) -> None:
    pool, ran = Pool(threads), []

    def fail() -> None:
        raise ArithmeticError("no")

    bad = Task(fail)
    after = Task(lambda: ran.append("after"), (bad,))
    with pytest.raises(ArithmeticError, match="no"):
        pool.run([bad, after])
    assert not ran
    pool.run([Task(lambda: ran.append("again"))])
    pool.close()
    assert ran == ["again"]


def test_whatever_ends_a_thread_ends_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may be raised between tasks; the others must not wait for what its thread had taken."""
    pool = Pool(2)
    take = _Graph._take

    def interrupted(self: _Graph) -> Task | None:
        found = take(self)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(_Graph, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run([Task(lambda: None) for _ in range(5)])
    pool.close()


def test_ready_tasks_run_side_by_side_on_threads_that_know_their_number() -> None:
    pool, together, numbers = Pool(3), threading.Barrier(3, timeout=60), []

    def meet() -> None:
        together.wait()
        numbers.append(pool.thread)

    pool.run([Task(meet) for _ in range(3)])
    pool.close()
    assert sorted(numbers) == [0, 1, 2]
    assert pool.thread == Pool(1).thread == 0


def test_no_tasks_are_no_work() -> None:
    for threads in (1, 2):
        pool = Pool(threads)
        pool.run([])
        pool.close()


@pytest.mark.parametrize("idle", [0.0, 0.02])
def test_helpers_are_there_whether_they_watch_or_sleep(idle: float) -> None:
    """A helper that has slept since its last work is woken, one that still watches is called."""
    pool = Pool(2)
    for _ in range(50):
        together = threading.Barrier(2, timeout=60)
        assert sorted(pool.map(threading.Barrier.wait, [together] * 2)) == [0, 1]
        time.sleep(idle)
    pool.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    pool = Pool(2)

    def together() -> None:
        pool.map(threading.Barrier.wait, [threading.Barrier(2, timeout=20)] * 2)

    together()
    forked = get_context("fork").Process(target=together)
    forked.start()
    forked.join()
    assert forked.exitcode == 0
    together()
    pool.close()


def test_several_threads_may_call_one_pool() -> None:
    """Each caller gets its own results, whoever computes them, and waits for no other caller's work."""
    pool = Pool(3)

    def call(caller: int) -> list[list[int]]:
        return [pool.map(lambda i: caller * 1000 + i, range(n % 7)) for n in range(300)]

    with ThreadPoolExecutor(4) as callers:
        for caller, results in enumerate(callers.map(call, range(4))):
            assert results == [[caller * 1000 + i for i in range(n % 7)] for n in range(300)]
    pool.close()


def test_work_that_takes_longer_than_anybody_watches_is_waited_for() -> None:
    """The caller has done its own part long before; a failure of the helper reaches it all the same."""
    pool = Pool(2)

    def work(i: int) -> int:
        together.wait()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
            raise ArithmeticError(f"{i} failed late")
        return i

    together = threading.Barrier(2, timeout=60)
    with pytest.raises(ArithmeticError, match="failed late"):
        pool.map(work, range(2))
    assert pool.map(str, range(3)) == ["0", "1", "2"]
    pool.close()


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_tasks_that_wait_for_a_long_one_begin_side_by_side(seconds: float) -> None:
    """The idle thread watches for the end of the first task, then sleeps until it is woken."""
    pool = Pool(2)
    for _ in range(10):
        together = threading.Barrier(2, timeout=60)
        first = Task(partial(time.sleep, seconds))
        pool.run([first, *(Task(together.wait, (first,)) for _ in range(2))])
    pool.close()


def test_a_pool_that_has_started_no_thread_has_none_to_end() -> None:
    pool = Pool(4096)
    pool.close()
    assert pool._calls.empty()
