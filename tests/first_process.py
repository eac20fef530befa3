"""A process that is the first of a PID namespace, as in a container.

A signal does nothing to it unless it has a handler for that. The system kills the others of the namespace at its end.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")


@contextmanager
def first_process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command as process 1; it is killed in the end. Skips the test where that is not allowed."""
    try:
        subprocess.run([*UNSHARE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("processes may not have a namespace of their own here")
    with subprocess.Popen([*UNSHARE, *command], stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def terminate(started: subprocess.Popen[str]) -> None:
    """Ask the command to end, as a container's runtime does."""
    (first,) = psutil.Process(started.pid).children()
    first.terminate()
