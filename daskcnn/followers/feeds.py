"""Feeds of a run's events to the tools that its job names: in batches, each on a thread of its own.

Training never waits for a tool. A tool that fails is told nothing more, and one warning says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from distributed import Client

from daskcnn.errors import JobError
from daskcnn.events import Event, Warned
from daskcnn.followers.mlflow_run import MLflowRun
from daskcnn.followers.prometheus_metrics import PrometheusMetrics
from daskcnn.followers.tensorboard_files import TensorBoardFiles
from daskcnn.followers.tool import FollowedRun, Tool
from daskcnn.job.tables import Job

TOOLS: dict[str, type[Tool]] = {tool.key: tool for tool in (TensorBoardFiles, MLflowRun, PrometheusMetrics)}
"""Every tool by its key of `[run]`."""

EVERY = 2.0  # seconds of events that a tool is handed at once
LAST = 120.0  # seconds that a run waits at its end for a tool to write what is left

Emit = Callable[[Event], None]


def named_tools(job: Job) -> dict[str, type[Tool]]:
    """Return the tools that the job asks for, by key."""
    return {key: tool for key, tool in TOOLS.items() if getattr(job.run, key)}


def check_tools(job: Job) -> None:
    """Raise JobError with everything that keeps a tool of the job from following it."""
    tools = named_tools(job)
    if problems := [problem for key in tools for problem in tools[key].problems(getattr(job.run, key))]:
        raise JobError(problems)


def check_tools_there(job: Job, client: Client) -> None:
    """Raise ClusterError where the cluster lacks what a tool of the job needs."""
    for tool in named_tools(job).values():
        tool.check_cluster(client)


class Feed:
    """One tool's events, until it fails or the run ends. They are kept until `start`."""

    def __init__(self, tool: type[Tool], *, every: float = EVERY, last: float = LAST) -> None:
        self._tool, self._every, self._last = tool, every, last
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._ended, self._failed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._emit: Emit = lambda _: None

    def put(self, event: Event) -> None:
        """Keep the event for the tool."""
        if not self._failed.is_set():
            self._events.put(event)

    def start(self, run: FollowedRun, emit: Emit) -> None:
        """Begin to hand the events on. emit: is told a warning where the tool fails."""
        self._emit = emit
        name = f"daskcnn-{self._tool.key}"
        self._thread = threading.Thread(target=self._follow, args=(run,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand on what is left, and wait for the tool to end."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join(self._last)
        if self._thread.is_alive() and not self._failed.is_set():
            self._give_up(f"not finished {self._last:g} s after the run; what it had to write last may be missing")

    def _follow(self, run: FollowedRun) -> None:
        tool: Tool | None = None
        try:
            tool = self._tool(run)
            while not self._ended.wait(self._every):
                self._hand_on(tool)
            self._hand_on(tool)
            tool.finish()
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".strip(": "))
        if tool is not None:
            with suppress(Exception):
                tool.close()

    def _hand_on(self, tool: Tool) -> None:
        waiting: list[Event] = []
        with suppress(Empty):
            while True:
                waiting.append(self._events.get_nowait())
        if waiting:
            tool.write(waiting)

    def _give_up(self, reason: str) -> None:
        self._failed.set()
        with suppress(Exception):  # a warning that cannot be told ends no run either
            remedy = "the run is not followed by this tool any more, and is complete without it"
            self._emit(Warned(value=f"run.{self._tool.key}", reason=reason, remedy=remedy))


class Feeds:
    """The feeds of all tools that a job names. Events that come before `following` wait for it."""

    def __init__(self, job: Job) -> None:
        self._feeds = [Feed(tool) for tool in named_tools(job).values()]

    def handle(self, event: Event) -> None:
        """Keep the event, with its time, for every tool. Returns at once."""
        event = event.logged(time.time()) if self._feeds and event.at is None else event
        for feed in self._feeds:
            feed.put(event)

    @contextmanager
    def following(self, run: FollowedRun, emit: Emit) -> Iterator[None]:
        """Hand events on meanwhile, and at the end what is left of them."""
        for feed in self._feeds:
            feed.start(run, emit)
        try:
            yield
        finally:
            for feed in self._feeds:
                feed.close()
