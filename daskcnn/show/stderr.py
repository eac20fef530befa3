"""What a command tells besides its result: lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from daskcnn.show.text import plain

WARNING = "warning: "


def say(message: str) -> None:
    """A line on stderr. Names in it may come from outside."""
    print(plain(message), file=sys.stderr, flush=True)


def say_warnings(message: str) -> None:
    """Say a message that is a warning, and no other."""
    if message.startswith(WARNING):
        say(message)


def warnings_by(say: Callable[[str], None]) -> Callable[[str], None]:
    """A function that says a message as a warning: about what a user may not have meant."""
    return lambda message: say(f"{WARNING}{message}")


warn = warnings_by(say)
"""A warning on stderr."""
