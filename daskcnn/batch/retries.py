"""Decides from the exit codes of a job's attempts if it is tried again, and when. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from daskcnn.batch.records import Attempt, State

FIRST, LONGEST = 10.0, 600.0
"""Seconds before the second attempt, and the most before a later one: each failure in a row doubles them."""
WRONG, UNUSABLE, LOST = 2, 3, 5
FINAL = {
    WRONG: "the job, its files or its data are wrong",
    4: "training diverged",
    6: "trained, but not kept where it was asked to be",
}
"""Exit codes after which another attempt would end the same way, in words."""
IN_WORDS = {
    UNUSABLE: "the cluster was not usable",
    LOST: "more was lost than a run survives",
    1: "a bug in daskcnn",
    130: "interrupted by SIGINT",
    137: "killed by the system",
    143: "ended by SIGTERM or its time limit",
    None: "its driver is gone without an exit code",
}
MOST_FAILURES, MOST_LOST = 3, 10
"""Attempts in a row without progress after which a job has failed: of all but those that lost too much, and of these.

Those that found no cluster they could use count for neither.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state that a job is in after an attempt, and the reason. again_at: when it is tried again, if it `waits`."""

    state: State
    why: str = ""
    again_at: float = 0.0


def outcome(attempts: Sequence[Attempt], now: float, *, cancelled: bool = False) -> Outcome:
    """Return what becomes of a job whose last attempt has ended.

    attempts: all of them, the oldest first. cancelled: somebody has asked it to end.
    A job whose cluster is not usable is tried again for as long as it takes.
    """
    last = attempts[-1]
    if last.exit_code == 0:
        return Outcome("done")
    if cancelled:
        return Outcome("cancelled", "cancelled while it ran")
    if last.exit_code in FINAL:
        return Outcome("failed", f"exit {last.exit_code}: {FINAL[last.exit_code]}")
    if last.rebooted:
        return Outcome("waiting", "the machine was started again", now)
    row = [last, *(attempt for attempt, _ in takewhile(_failed, zip(attempts[-2::-1], attempts[:0:-1], strict=True)))]
    failures = sum(_kind(attempt) == _kind(last) for attempt in row)
    code = "" if last.exit_code is None else f"exit {last.exit_code}: "
    why = f"{code}{IN_WORDS.get(last.exit_code, 'its driver has crashed')}"
    most = {UNUSABLE: failures + 1, LOST: MOST_LOST}.get(_kind(last), MOST_FAILURES)
    if failures >= most:
        return Outcome("failed", f"{why}; {failures} times in a row without progress")
    seconds = pause(len(row) - 1)
    return Outcome("waiting", f"{why}; tried again after {seconds:g} s", now + seconds)


def pause(failures: int) -> float:
    """Return the seconds until the next attempt, after this number of failures before the last one."""
    return min(LONGEST, FIRST * 2 ** min(failures, 10))


def _kind(attempt: Attempt) -> int:
    """Return what counts by itself: UNUSABLE, LOST, or 0 for all other failures."""
    return attempt.exit_code if attempt.exit_code in (UNUSABLE, LOST) else 0


def _failed(pair: tuple[Attempt, Attempt]) -> bool:
    """Return True if an attempt belongs to the same row of failures as the one after it."""
    attempt, later = pair
    return not (later.progressed or attempt.rebooted)
