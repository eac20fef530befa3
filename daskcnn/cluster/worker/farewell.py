"""A worker's round that ends early, as it or the server leaves or others come, and its report.

The driver asks for the report: a worker that is closing begins no task, and may not tell the result of one. Where the
run needs tasks of it until it lets it go (`leaving.hold_end_up`), reports are their results.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal, TypeAlias

from daskcnn.training.round_report import RoundReport

RoundKey: TypeAlias = tuple[int, int, int]
"""A round: life, session, and number."""
TAKEN = 0.1
"""Seconds for the report to reach the wire before its worker ends."""
_PAUSE = 0.02  # seconds between two looks for the report


class Farewell:
    """Knows in a worker's session which round is under way, and whether it is to end early."""

    def __init__(self) -> None:
        self._leaves = False
        self._early: RoundKey | None = None
        self._round: RoundKey | None = None
        self._report: RoundReport | None = None
        self._ended = True
        self._taken: float | None = None
        self._over = False
        self.heard = False

    # --- on the thread of the round's task ---

    def begin(self, key: RoundKey) -> None:
        """Take note that a round begins."""
        self._report, self._ended, self._round, self._taken = None, False, key, None

    def end(self, report: RoundReport | None) -> None:
        """Take note that the round has ended. None: nothing came of it."""
        self._report, self._ended = report, True

    @property
    def asked_by_run(self) -> bool:
        """True if the driver has asked the round under way to end early."""
        return not self._ended and self._early == self._round

    @property
    def asked(self) -> bool:
        """True if the round under way is to end early, by the driver or as the worker is to end."""
        return self.asked_by_run or (self._leaves and not self._ended)

    # --- on the worker's event loop ---

    def leave(self) -> None:
        """Take note that the worker is to end."""
        self._leaves = True

    def forget(self) -> None:
        """Take note that the run is over, or goes on without the worker."""
        self._report, self._over = None, True

    @property
    def done(self) -> bool:
        """True once the driver has the last round's report, or needs none."""
        return self._over or (self._leaves and self._taken is not None and time.monotonic() - self._taken > TAKEN)

    def ask(self, key: RoundKey) -> None:
        """Let this round end early, whether it has begun or not."""
        self._early, self.heard = key, True

    async def report(self, key: RoundKey, within: float) -> RoundReport | Literal["not begun"] | None:
        """Let this round end, and return its report; None if it fails, or does not come in time.

        On a worker that is to end no task begins any more.
        """
        self.ask(key)
        deadline = time.monotonic() + within
        while not self._over and time.monotonic() < deadline:
            if self._ended and (self._leaves or self._round == key):
                break
            await asyncio.sleep(_PAUSE)
        self._taken = time.monotonic()
        if self._round != key:
            return "not begun" if self._leaves else None
        return self._report
