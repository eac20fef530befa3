"""What a command tells besides its result: lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from daskcnn.show.text import plain


def say(message: str) -> None:
    """A line on stderr. Names in it may come from outside."""
    print(plain(message), file=sys.stderr, flush=True)


def warnings_by(say: Callable[[str], None]) -> Callable[[str], None]:
    """A function that says a message as a warning: about what a user may not have meant."""
    return lambda message: say(f"warning: {message}")


warn = warnings_by(say)
"""A warning on stderr."""
