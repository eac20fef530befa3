"""Files that are no regular ones: whoever opens one to read may wait for ever. And folders that root is not to have."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

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
def not_root(folder: Path) -> Iterator[Path]:
    """Be another user than root in this folder, and its owner: root may write whatever the modes say. Yields its path.

    The path is relative: root's own folders above let no other user through.
    """
    root = os.geteuid() == 0
    if root:
        os.chown(folder, NOBODY, -1)
    with chdir(folder):
        try:
            if root:
                os.seteuid(NOBODY)
            yield Path()
        finally:
            if root:
                os.seteuid(0)
