"""Any hostile file is refused with a message, in bounded memory: each is read by a command in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.commands import outcome
from tests.hostile.hostile_files import FILES

MEMORY = 500 * 10**6
"""Bytes that a command may take at most. Without any file it takes 100 MB."""
TIME = 20.0
"""Seconds of processors' time that a command may take at most. The test waits longer."""

HARMLESS = {
    "image with entries",
    "image of 24 million pixels of 16 bits, cut off",
    "image of 24 million transparent pixels, cut off",
    "GIF of 2,000,000 frames",
}
"""Files that are read: Pillow passes over what is wrong with them, and only a first frame is looked at."""

EVERY_TIME = (
    "manifest of 3 MB of numbers, signed",
    "job of layers",
    "arrays of 10 GB",
    "image of 9,400 by 9,400",
)
"""One of each kind; the others run with `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in FILES]
)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    ended = outcome(tmp_path, *FILES[name](tmp_path), timeout=5 * TIME)
    assert "internal error" not in ended.told
    assert "Traceback" not in ended.told
    assert ended.code == 2 or name in HARMLESS, ended.told
    assert "error: " in ended.told or name in HARMLESS, ended.told
    assert len(ended.told) < 20_000
    assert ended.peak < MEMORY, f"{ended.peak / 1e6:.0f} MB"
    assert ended.seconds < TIME, f"{ended.seconds:.0f} s"
