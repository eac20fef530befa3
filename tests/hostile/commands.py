"""A daskcnn command in a process of its own, with the memory and the time that it took."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.hostile import measured

ROOM = 16 << 30
"""Bytes of address space: a command that goes wild ends by itself, before the machine does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes
    ----------
    code : exit code
    told : what it printed on stderr
    peak : the most memory it had, in bytes
    seconds : processors' time that it took, by which a busy machine does not count
    """

    code: int
    told: str
    peak: int
    seconds: float


def outcome(folder: Path, *args: object, timeout: float = 120, room: int = ROOM) -> Outcome:
    """Run `daskcnn ARGS` in this folder."""
    note = folder / "took"
    done = subprocess.run(
        [sys.executable, measured.__file__, str(note), *map(str, args)],
        cwd=folder,
        timeout=timeout,
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room)),
    )
    assert note.exists(), f"it was killed: {done}"
    peak, seconds = note.read_text().split()
    return Outcome(done.returncode, done.stderr.decode(errors="replace"), int(peak), float(seconds))
