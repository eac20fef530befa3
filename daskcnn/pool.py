"""The threads of one worker, and the tasks of the inner layer: a graph with priorities.

BPT-CNN, Alg. 4.1 and 4.2: a pass is decomposed into tasks. A task is ready when those it depends on are done. Ready
tasks of the first levels of the graph go first, each to the least loaded thread, which is the next idle one.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar
from weakref import finalize

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Task:
    """A function of about a millisecond or more, run after the tasks it depends on."""

    work: Callable[[], Any]
    after: Sequence[Task] = ()
    level: int = field(init=False)
    """Length of the longest chain of tasks before it: priority falls with it (BPT-CNN, Alg. 4.2)."""

    def __post_init__(self) -> None:
        self.level = 1 + max((task.level for task in self.after), default=-1)


class _Call:
    """Work that a helping thread may begin, once, until the caller takes it back."""

    def __init__(self, work: Callable[[], None]) -> None:
        # NumPy's error state is a context variable: threads see the caller's only if it is handed on
        self._context, self._work = copy_context(), work
        self._taken, self._done = Lock(), Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Do the work, unless it was taken back."""
        if not self._taken.acquire(blocking=False):
            return
        try:
            self._context.run(self._work)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def finish(self) -> BaseException | None:
        """Take the work back if no thread has begun it, else wait for its end. Return the exception it ended with."""
        if not self._taken.acquire(blocking=False):
            self._done.acquire()
        return self._error


def _help(calls: SimpleQueue[_Call | None], local: threading.local, number: int) -> None:
    """A helping thread: do what is called for, until None comes."""
    local.thread = number
    while (call := calls.get()) is not None:
        call.begin()
        del call  # it holds arrays


class Pool:
    """Threads of one worker, the caller among them. BLAS must be single-threaded inside (`single_threaded_blas`).

    The caller begins at once and the others join: waking a thread takes longer than many small tasks, and work that is
    finished by then does not wait for the other threads.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: a pool needs at least one; set train.threads to 1 or more")
        self.threads = threads
        self._local = threading.local()
        # locks and a queue in C begin and end sooner than futures of the standard library
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._end = finalize(self, _end, self._calls, threads - 1)

    @property
    def thread(self) -> int:
        """Number of the calling thread in the pool, 0 … threads - 1; 0 for the caller of the pool.

        Names scratch memory.
        """
        return getattr(self._local, "thread", 0)

    def map(self, function: Callable[[T], R], items: Iterable[T], *, threads: int | None = None) -> list[R]:
        """Return `function` of every item, in order. One of the exceptions is raised and ends the rest.

        At most `threads` threads are used; the pool's by default.
        """
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

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks. Those they depend on must be among them.

        The first exception is raised after all tasks have ended.

        Tasks of one level start in the order given. On one thread this fixes the order of all tasks.
        """
        if self.threads == 1:
            for task in sorted(tasks, key=lambda task: task.level):
                task.work()
            return
        graph = _Graph(tasks)
        self._together(graph.work, max(Counter(task.level for task in tasks).values(), default=0))
        graph.check()

    def _together(self, work: Callable[[], None], at_most: int) -> None:
        """Call `work` on the caller's thread and on as many others as can be of use."""
        calls = [_Call(work) for _ in range(min(self.threads, at_most) - 1)]
        if calls and not self._helpers:
            self._start()
        for call in calls:
            self._calls.put(call)
        try:
            work()
        finally:
            errors = [error for call in calls if (error := call.finish())]
        if errors:
            raise errors[0]

    def _start(self) -> None:
        """Start the helping threads, which know nothing of the pool: it ends with its last owner, and they with it."""
        for number in range(1, self.threads):
            arguments = self._calls, self._local, number
            self._helpers.append(threading.Thread(target=_help, args=arguments, name=f"daskcnn_{number}", daemon=True))
            self._helpers[-1].start()

    def close(self) -> None:
        """Stop the threads."""
        self._end()
        for helper in self._helpers:
            helper.join()

    def slices(self, size: int, *, at_least: int = 1) -> list[slice]:
        """Cut range(size) into one slice per thread, nearly equal, none shorter than `at_least` (if size allows)."""
        parts = max(1, min(self.threads, size // at_least))
        edges = [size * i // parts for i in range(parts + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]


def _end(calls: SimpleQueue[_Call | None], helpers: int) -> None:
    for _ in range(helpers):
        calls.put(None)


class _Graph:
    """Tasks and what they wait for. Every thread takes the ready task of highest priority until none is left."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._order = {task: (task.level, i) for i, task in enumerate(tasks)}
        self._waits = {task: len(task.after) for task in tasks}
        self._next: dict[Task, list[Task]] = {task: [] for task in tasks}
        for task in tasks:
            for before in task.after:
                self._next[before].append(task)
        self._ready = [self._order[task] for task in tasks if not task.after]
        heapify(self._ready)
        self._left = len(tasks)
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        """Take and run tasks until all are done or one has failed."""
        try:
            while (task := self._take()) is not None:
                task.work()
                self._done(task)
        except BaseException as error:  # a signal's too: the others must not wait for a task that was taken
            self._fail(error)

    def _take(self) -> Task | None:
        with self._changed:
            while not self._ready and self._left:
                self._changed.wait()
            return self._tasks[heappop(self._ready)[1]] if self._left else None

    def _done(self, task: Task) -> None:
        with self._changed:
            if not self._left:
                return  # another one failed
            self._left -= 1
            for after in self._next[task]:
                self._waits[after] -= 1
                if not self._waits[after]:
                    heappush(self._ready, self._order[after])
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._left = 0
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the first failure."""
        if self._error is not None:
            raise self._error
