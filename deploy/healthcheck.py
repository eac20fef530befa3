"""The images' HEALTHCHECK: does the scheduler or worker of this container answer? A job is well as long as it lives."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

DEFAULT = {"scheduler": "127.0.0.1:8787", "worker": None}
"""The place of `/health` if the command names no other. A worker takes any free port."""


def health_url(command: list[str]) -> str | None:
    """Return the URL that `dask scheduler …` or `dask worker …` answers. None: another command, or an unknown port."""
    role = next((word for word in command[:3] if word in DEFAULT), None)
    if role is None:
        return None
    address = _option(command, "--dashboard-address") or DEFAULT[role]
    if address is None:
        print("not asked, as the worker's port is not known: start it with --dashboard-address :8788")
        return None
    host, _, port = address.rpartition(":")
    return f"http://{host or '127.0.0.1'}:{port}/health"


def _option(command: list[str], name: str) -> str | None:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def main(process: Path = Path("/proc/1/cmdline")) -> int:
    """0 where it answers or cannot be asked, 1 where it does not answer."""
    try:
        url = health_url(process.read_text().split("\0")[1:])  # the first is the interpreter
        if url is not None:
            urllib.request.urlopen(url, timeout=8).close()
    except (OSError, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
