"""`python -m daskcnn.run`: a job from its flags and its file to its summary; the exit code says how it ended."""

from __future__ import annotations

import sys

from daskcnn.cli.run import run as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main(prog_name="python -m daskcnn.run"))
