"""Files that are no regular ones: whoever opens one to read may wait for ever. And a folder whose modes count."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SPECIAL = {"pipe": "named pipe", "device": "device", "socket": "socket"}
"""Kinds of special files, as messages name them."""


def special(path: Path, kind: str) -> Path:
    """Put such a file in place of what is there. The device is a link to /dev/zero, which never ends."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as end:
            here = Path.cwd()
            os.chdir(path.parent)  # a socket's path is short
            try:
                end.bind(path.name)
            finally:
                os.chdir(here)
    return path


NOBODY = 65534


@contextmanager
def folder_of_a_user() -> Iterator[Path]:
    """Be another user than root, to whom modes mean something, with a folder of their own: tests' are root's alone."""
    root = os.geteuid() == 0
    with TemporaryDirectory() as folder:
        if root:
            os.chown(folder, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)
