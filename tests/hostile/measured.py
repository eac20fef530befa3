"""Runs a daskcnn command in this process, and writes what it took to a file: `measured.py FILE ARGS…`.

That is the most memory, in bytes, and the processors' time, in seconds.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


def peak() -> int:
    """The most memory this process has had, in bytes. `ru_maxrss` would count the parent's before the exec."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    from daskcnn.cli import main

    try:
        main(sys.argv[2:])
    finally:
        took = os.times()
        Path(sys.argv[1]).write_text(f"{peak()} {sum(took[:4])}")
