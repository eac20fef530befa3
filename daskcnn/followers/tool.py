"""What a tool that follows a run is told, and what it has to answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from distributed import Client

from daskcnn.errors import installing
from daskcnn.events import Event
from daskcnn.job.tables import Job


@dataclass(frozen=True)
class FollowedRun:
    """The run that tools follow.

    Attributes
    ----------
    job : its job.
    client : the client of the cluster that it trains on.
    directory : gives its run directory; another one once the run had to be kept elsewhere.
    """

    job: Job
    client: Client
    directory: Callable[[], Path]


class Tool(ABC):
    """A tool that is told a run's events. All its methods but the checks are called on a thread of its own.

    What they raise ends the tool with a warning, and never the run.
    """

    key: ClassVar[str]
    """The key of `[run]` that asks for it."""
    extra: ClassVar[str]
    """The extra that brings its package."""
    package: ClassVar[str]
    """The module that it needs on the driver; empty for none."""

    @abstractmethod
    def __init__(self, run: FollowedRun) -> None: ...

    @classmethod
    def problems(cls, setting: str | bool) -> Iterator[str]:
        """What keeps it from following a run with this setting, found before anything starts."""
        if cls.package and find_spec(cls.package) is None:
            yield (
                f"run.{cls.key}: needs the package {cls.package}, which is not installed; "
                f"{installing(cls.extra)}, or remove the key"
            )

    @classmethod
    def check_cluster(cls, client: Client) -> None:
        """Raise ClusterError where the cluster lacks what the tool needs."""
        return

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None:
        """Take in the events since the last call, in order."""

    def finish(self) -> None:
        """Write what is left. The run has ended, and its directory is complete."""
        return

    def close(self) -> None:
        """Free what it holds, after an error too."""
        return
