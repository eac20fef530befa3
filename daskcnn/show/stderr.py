"""What a command tells besides its result: lines on stderr."""

from __future__ import annotations

import sys

from daskcnn.show.text import plain


def say(message: str) -> None:
    """A line on stderr. Names in it may come from outside."""
    print(plain(message), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """A line on stderr about what a user may not have meant."""
    say(f"warning: {message}")
