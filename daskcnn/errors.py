"""Errors that a user can mend: each names the value, the reason and the remedy, and has an exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Self
from unicodedata import category
from urllib.parse import unquote, urlsplit

_MOST_TOLD = 50
_LINE = "\n"


def escaped(text: str, *, keep: str = "") -> str:
    """Escape control characters (`\\x1b`) but for `keep`, so that a name from outside cannot drive a terminal.

    Characters that turn the direction of writing, have no width, or come from bytes that are no UTF-8 are escaped too.
    """
    if text.isprintable():
        return text
    kept = (c.isprintable() or c in keep or category(c) == "Zs" for c in text)
    return "".join(c if stays else c.encode("unicode_escape").decode() for c, stays in zip(text, kept, strict=True))


def told(value: str, reason: str, remedy: str) -> str:
    """Return one line of the three: "value: reason; remedy", without those that are empty."""
    return "; ".join(filter(None, [": ".join(filter(None, [value, reason])), remedy]))


@cache
def installing(extra: str) -> str:
    """Return the command that installs an extra from where daskcnn came from: a clone, a file, or the package index."""
    try:
        origin = json.loads(distribution("daskcnn").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    place = urlsplit(origin.get("url", ""))
    if place.scheme != "file":
        return f"pip install 'daskcnn[{extra}]'"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{unquote(place.path)}[{extra}]'"


class UserError(Exception):
    """Something outside the program is wrong; shown as "value: reason; remedy", without a traceback.

    The value is a path, an address or a setting; a whole message where nothing else is given, kept as the reason. The
    remedy is the way to mend it.
    """

    exit_code = 2

    def __init__(self, value: object = "", reason: object = "", remedy: str = "") -> None:
        whole = not str(reason)  # a message of its own may have lines
        value = escaped(str(value), keep=_LINE if whole else "")
        reason, remedy = escaped(str(reason), keep=_LINE), escaped(remedy, keep=_LINE)
        super().__init__(told(value, reason, remedy))
        self.value, self.reason, self.remedy = ("", value, remedy) if whole else (value, reason, remedy)


class NotInstalled(UserError, ImportError):
    """A package that an optional part needs is missing; the remedy is the command that installs it."""


class JobError(UserError):
    """The job file or its flags are wrong: every problem at once, one a line; of very many the first ones."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "the job has a problem" if count == 1 else f"the job has {count} problems"
        lines = [f"  {escaped(problem, keep=_LINE)}" for problem in self.problems[:_MOST_TOLD]]
        more = [f"  … and {count - _MOST_TOLD:,} more"] if count > _MOST_TOLD else []
        super().__init__("\n".join([f"{head}:", *lines, *more]))

    def __reduce__(self) -> tuple[type[JobError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class DataError(UserError):
    """A data set, archive, checkpoint or image is missing, damaged or not what it should be."""


class InUse(DataError):
    """Another process writes the run. It may end: this is worth another try."""

    exit_code = 3


class ClusterError(UserError):
    """The cluster cannot run the job: no scheduler, too few workers, a resource, a version or the data missing."""

    exit_code = 3


class DataUnseen(ClusterError):
    """A worker does not see the data set."""


class Diverged(UserError):
    """The loss, a gradient or a push is not finite; the message names the last good checkpoint."""

    exit_code = 4


class Lost(UserError):
    """More was lost, or stalled for longer, than the run survives; the message says how to resume."""

    exit_code = 5


class NotKept(UserError):
    """The network is trained, but could not be kept in its run directory; the message names where it is instead.

    `place` is the run directory that holds the whole run, None where it could be written nowhere.
    """

    exit_code = 6

    def __init__(self, message: str, place: Path | None) -> None:
        super().__init__(message)
        self.place = place

    def __reduce__(self) -> tuple[type[NotKept], tuple[str, Path | None]]:
        return type(self), (str(self), self.place)


_SIGNALS: dict[int, str] = {
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGTERM: "a request to end (SIGTERM)",
    signal.SIGHUP: "its terminal, which was closed (SIGHUP)",
    signal.SIGUSR1: "a batch system's warning (SIGUSR1)",
    signal.SIGUSR2: "a batch system's warning (SIGUSR2)",
    signal.SIGXCPU: "its limit of processor time (SIGXCPU)",
}


class Interrupted(UserError):
    """A signal ended the run; what was trained before it is saved. The exit code is 128 plus the signal's number."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum

    @classmethod
    def by(cls, signum: int, more: str = "") -> Self:
        """Return the error of a signal, in words. more: what follows them."""
        return cls(f"interrupted by {_SIGNALS.get(signum, f'signal {signum}')}{more}", signum)

    @classmethod
    def at_limit(cls, seconds: float, more: str = "") -> Self:
        """Return the error of a run whose time is over, with the exit code of a request to end."""
        return cls(f"interrupted by its time limit (run.time_limit = {seconds:g} s){more}", signal.SIGTERM)

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, int]]:
        return type(self), (str(self), self.signum)


class Stop(Exception):
    """Raised by a function that is told a run's events: the run keeps its state and ends with status "stopped".

    What it says stands in the summary: `Stop("good enough")`.
    """


class PushRefused(Exception):
    """The server refuses an event: wrong shape, dtype, worker, session, sequence or version, or a value not finite.

    `code` is the reason as a `daskcnn.ps.Code`; empty where no server has said.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[PushRefused], tuple[str, str]]:
        return type(self), (str(self), self.code)


def nearest(word: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: `; did you mean 'x'?`, or all known words where none is close."""
    words = list(known)
    return similar(word, words) or all_known(words)


def or_own(hint: str, remedy: str = "one of your own needs its module in run.imports (--import)") -> str:
    """Return the end of a message about an unknown word, with the remedy where a module of the user's has it."""
    return f"{hint} {remedy[0].upper()}{remedy[1:]}" if hint.endswith("?") else f"{hint}; {remedy}"


def similar(word: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown word, `; did you mean 'x'?`; empty where none is close."""
    close = get_close_matches(str(word), sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def all_known(words: Iterable[str]) -> str:
    """The end of a message about an unknown word that names all known ones."""
    listed = ", ".join(sorted(words))
    return f"; known: {listed}" if listed else "; there are none"
