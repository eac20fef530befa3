"""A run's connection to the scheduler. Every question has a limit, and a signal is heeded while the run waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from distributed import Client

from daskcnn.cluster.link.calls import Check, answer_to, ask_scheduler, no_check, silent_among
from daskcnn.cluster.link.members import present
from daskcnn.errors import Interrupted, Lost


def heed_signals(interrupted: Callable[[], int | None]) -> Check:
    """Return a check that raises Interrupted after a signal. interrupted: gives its number, None before it came."""

    def heed() -> None:
        if (signum := interrupted()) is not None:
            raise Interrupted(f"interrupted by signal {signum}", signum)

    return heed


class Connection:
    """Asks the scheduler about its workers and their tasks.

    Parameters
    ----------
    heed : called now and then while it waits; may raise, as after a signal
    """

    def __init__(self, client: Client, heed: Check) -> None:
        self.client, self._heed = client, heed

    def heed(self) -> None:
        """Raise what there is to heed, such as Interrupted."""
        self._heed()

    def ignore_signals(self) -> None:
        """Let nothing interrupt from now on, so that the run's end is finished and kept."""
        self._heed = no_check

    def workers(self) -> dict[str, dict[str, Any]]:
        """The scheduler's entry for each of its workers, by address. Raises Lost where the scheduler is gone."""
        try:
            found = present(self.client, self.heed)
        except OSError as error:
            raise self._lost() from error
        if self.client.status != "running":
            raise self._lost()
        return found

    def processing(self) -> Mapping[str, Any]:
        """The scheduler's tasks of each worker, by address; empty where it does not answer."""
        with suppress(OSError):
            return dict(answer_to(self.client, self.client.scheduler.processing(workers=None), check=self.heed))
        return {}

    def scheduler_seconds(self) -> float:
        """Seconds of processor time that the scheduler has used so far. Raises Lost where the scheduler is gone."""
        try:
            return float(ask_scheduler(self.client, time.process_time, check=self.heed))
        except OSError as error:
            raise self._lost() from error

    def silent(self, addresses: Iterable[str]) -> set[str]:
        """Those of the workers that do not answer now. Raises Lost where the scheduler is gone."""
        try:
            return silent_among(self.client, dict.fromkeys(addresses), check=self.heed)
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> Lost:
        return Lost(f"scheduler {self.client.scheduler.address}: connection lost")
