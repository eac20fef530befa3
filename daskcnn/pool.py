"""The threads of one worker, and the tasks of the inner layer: a graph with priorities.

BPT-CNN, Alg. 4.1 and 4.2: a pass is decomposed into tasks. A task is ready when those it depends on are done. Ready
tasks of the first levels of the graph go first, each to the least loaded thread, which is the next idle one.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from queue import SimpleQueue
from threading import Lock
from timeit import repeat
from typing import Any, TypeVar
from weakref import WeakSet, finalize

import numpy as np

from daskcnn import compiled

T = TypeVar("T")
R = TypeVar("R")

WATCH_US = 1000.0
"""Microseconds that a thread watches for the next call, or for the end of another's work, before it sleeps."""
HAND_OVER_US = 5.0
"""Microseconds that a caller waits, at most, for a helper that watches to come into the interpreter."""


@dataclass(eq=False, slots=True)
class Task:
    """A function of about a millisecond or more, run after the tasks it depends on."""

    work: Callable[[], Any]
    after: Sequence[Task] = ()
    level: int = field(init=False)
    """Length of the longest chain of tasks before it: priority falls with it (BPT-CNN, Alg. 4.2)."""

    def __post_init__(self) -> None:
        self.level = 1 + max((task.level for task in self.after), default=-1)


def equal_slices(size: int, parts: int) -> list[slice]:
    """Cut range(size) into `parts` slices, equal within one."""
    return [slice(size * i // parts, size * (i + 1) // parts) for i in range(parts)]


class _Signals:
    """Numbers by which threads of a pool call each other while neither holds the interpreter.

    A helper that has done its work watches for the next call for a while before it sleeps. It is called at a moment
    when the caller has left the interpreter to it: otherwise it would wait for that asleep.
    """

    def __init__(self, threads: int) -> None:
        compiled.warm.warm_module("signals", "float32")
        self._functions, self.step_aside = compiled.signals, compiled.loop.step_aside
        # a line of the cache each: how many calls there were, and how many each helper has ended
        self._numbers = np.zeros((threads, 8), np.int64)
        first, apart = self._numbers.ctypes.data, self._numbers.strides[0]
        self._addresses = [first + row * apart for row in range(threads)]
        self._rows = self._numbers.data
        self._watching = [False] * threads
        turns_of_us = 1e-3 / min(repeat(lambda: self._functions.watch(first, 0, 1000), repeat=5, number=1))
        self._watch, self._hand_over = int(WATCH_US * turns_of_us), int(HAND_OVER_US * turns_of_us)

    def call(self) -> None:
        """Tell helpers that calls are in the queue."""
        self._functions.call(self._addresses[0], self._hand_over if any(self._watching) else 0)

    def ended(self, helper: int) -> int:
        """Return how many calls this helper has ended."""
        return self._rows[helper, 0]

    def watch_end(self, helper: int, ended: int) -> None:
        """Watch for the end of a helper's call, for a while. It had ended so many before it."""
        self.watch(self._addresses[helper], ended)

    def watch(self, address: int, seen: int) -> bool:
        """Watch a number for a while; return whether it is another than the one seen."""
        return self._functions.watch(address, seen, self._watch)

    def end(self, helper: int, calls: SimpleQueue[_Call | None]) -> None:
        """Tell that a helper's call has ended, and watch for the next one, for a while."""
        seen = self._rows[0, 0]
        turns = self._watch if calls.empty() else 0
        self._watching[helper] = True
        self._functions.end_and_watch(self._addresses[helper], self._addresses[0], seen, turns)
        self._watching[helper] = False
        if calls.empty():
            self.step_aside()


class _Call:
    """Work that a helping thread may begin, once, until the caller takes it back."""

    def __init__(self, work: Callable[[], None], signals: _Signals) -> None:
        # NumPy's error state is a context variable: threads see the caller's only if it is handed on
        self._context, self._work, self._signals = copy_context(), work, signals
        self._taken, self._done = Lock(), Lock()
        self._done.acquire()
        self._by: tuple[int, int] | None = None
        self._error: BaseException | None = None

    def begin(self, helper: int) -> None:
        """Do the work, unless it was taken back."""
        if not self._taken.acquire(blocking=False):
            return
        self._by = helper, self._signals.ended(helper)
        try:
            self._context.run(self._work)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def finish(self) -> BaseException | None:
        """Take the work back if no thread has begun it, else wait for its end. Return the exception it ended with."""
        if not self._taken.acquire(blocking=False):
            if self._by:
                self._signals.watch_end(*self._by)
            if not self._done.acquire(blocking=False):
                self._signals.step_aside()
                self._done.acquire()
        return self._error


def _help(calls: SimpleQueue[_Call | None], signals: _Signals, local: threading.local, number: int) -> None:
    """A helping thread: do what is called for, until None comes."""
    local.thread = number
    while (call := calls.get()) is not None:
        call.begin(number)
        del call  # it holds arrays
        signals.end(number, calls)


class Pool:
    """Threads of one worker, the caller among them. BLAS must be single-threaded inside (`single_threaded_blas`).

    The caller does not wait for the others to join: waking one that sleeps takes longer than many small tasks, and
    work that is finished by then does not wait for them.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: a pool needs at least one; set train.threads to 1 or more")
        self.threads = threads
        self._without_helpers()
        _POOLS.add(self)

    def _without_helpers(self) -> None:
        """Begin without helping threads, as a forked process does too: they are its parent's."""
        self._local = threading.local()
        # locks and a queue in C begin and end sooner than futures of the standard library
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._starting = Lock()
        self._signals: _Signals | None = None
        self._end = finalize(self, _end, self._calls, self._helpers)

    @property
    def thread(self) -> int:
        """Number of the calling thread, 0 … threads - 1; 0 for the pool's caller. It names scratch memory."""
        return getattr(self._local, "thread", 0)

    def map(self, function: Callable[[T], R], items: Iterable[T], *, threads: int | None = None) -> list[R]:
        """Return `function` of every item, in order, on at most `threads` threads. An exception ends the rest."""
        if self.threads == 1 or threads == 1:
            return [function(item) for item in items]
        every = list(items)
        results: list[Any] = [None] * len(every)
        left = iter(range(len(every)))

        def work() -> None:
            try:
                for i in left:
                    results[i] = function(every[i])
            except BaseException:
                deque(left, maxlen=0)
                raise

        self._together(work, min(len(every), threads or self.threads))
        return results

    def share(self, function: Callable[[int, int, int], Any], count: int, threads: int) -> None:
        """Call `function(first, last, share)` for as many equal shares of range(count) as there are threads to use."""

        def one(i: int) -> None:
            function(count * i // threads, count * (i + 1) // threads, i)

        self.map(one, range(threads), threads=threads)

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks; those they depend on must be among them. Raise the first exception when all have ended.

        Tasks of one level start in the order given. On one thread this fixes the order of all tasks.
        """
        at_once = max(Counter(task.level for task in tasks).values(), default=0)
        if self.threads == 1 or at_once <= 1:
            for task in sorted(tasks, key=lambda task: task.level):
                task.work()
            return
        graph = _Graph(tasks, self._signals or self._start())
        self._together(graph.work, at_once)
        if graph.error is not None:
            raise graph.error

    def _together(self, work: Callable[[], None], at_most: int) -> None:
        """Call `work` on the caller's thread and on as many others as can be of use."""
        helpers = min(self.threads, at_most) - 1
        if helpers < 1:
            work()
            return
        signals = self._signals or self._start()
        calls = [_Call(work, signals) for _ in range(helpers)]
        for call in calls:
            self._calls.put(call)
        signals.call()
        try:
            work()
        finally:
            errors = [error for call in calls if (error := call.finish())]
        if errors:
            raise errors[0]

    def _start(self) -> _Signals:
        """Start the helping threads, which know nothing of the pool: it ends with its last owner, and they with it."""
        with self._starting:
            if self._signals is None:
                signals = _Signals(self.threads)
                for number in range(1, self.threads):
                    given = self._calls, signals, self._local, number
                    helper = threading.Thread(target=_help, args=given, name=f"daskcnn_{number}", daemon=True)
                    helper.start()
                    self._helpers.append(helper)
                self._signals = signals
            return self._signals

    def close(self) -> None:
        """End the threads."""
        self._end()
        for helper in self._helpers:
            helper.join()

    def slices(self, size: int, *, at_least: int = 1) -> list[slice]:
        """Cut range(size) into one slice per thread, nearly equal, none shorter than `at_least` (if size allows)."""
        return equal_slices(size, max(1, min(self.threads, size // at_least)))


_POOLS: WeakSet[Pool] = WeakSet()


def _after_fork() -> None:
    for pool in _POOLS:
        pool._end.detach()
        pool._without_helpers()


os.register_at_fork(after_in_child=_after_fork)


def _end(calls: SimpleQueue[_Call | None], helpers: Sequence[threading.Thread]) -> None:
    for _ in helpers:
        calls.put(None)


class _Graph:
    """Tasks and what they wait for. Every thread takes the ready task of highest priority until none is left."""

    def __init__(self, tasks: Sequence[Task], signals: _Signals) -> None:
        self._tasks, self._signals = tasks, signals
        self._order = {task: (task.level, i) for i, task in enumerate(tasks)}
        self._waits = {task: len(task.after) for task in tasks}
        self._next: dict[Task, list[Task]] = {task: [] for task in tasks}
        for task in tasks:
            for before in task.after:
                self._next[before].append(task)
        self._ready = [self._order[task] for task in tasks if not task.after]
        heapify(self._ready)
        self._left = len(tasks)
        self.error: BaseException | None = None  # the first
        self._changed = threading.Condition()
        self._sleeping = 0
        self._changes = np.zeros(1, np.int64)
        self._address, self._row = self._changes.ctypes.data, self._changes.data

    def work(self) -> None:
        """Take and run tasks until all are done or one has failed."""
        try:
            while (task := self._take()) is not None:
                task.work()
                self._done(task)
        except BaseException as error:  # a signal's too: the others must not wait for a task that was taken
            self._fail(error)

    def _take(self) -> Task | None:
        """Wait for a task that is ready, watching for it before sleeping; None: all are done, or one has failed."""
        watched = False
        while True:
            with self._changed:
                while watched and self._left and not self._ready:
                    self._sleeping += 1
                    self._changed.wait()
                    self._sleeping -= 1
                if not self._left:
                    return None
                if self._ready:
                    return self._tasks[heappop(self._ready)[1]]
                seen = self._row[0]
            watched = not self._signals.watch(self._address, seen)

    def _done(self, task: Task) -> None:
        with self._changed:
            if not self._left:
                return  # another one failed
            self._left -= 1
            for after in self._next[task]:
                self._waits[after] -= 1
                if not self._waits[after]:
                    heappush(self._ready, self._order[after])
            self._tell()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._left = 0
            self._tell()

    def _tell(self) -> None:
        self._row[0] += 1
        if self._sleeping:
            self._changed.notify_all()
