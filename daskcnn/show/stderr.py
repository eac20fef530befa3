"""What a command tells besides its result: lines on stderr."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)
