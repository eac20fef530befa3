"""The folder of a spool: its owner's alone, on a disk of one machine. The folder of its runs is noted there."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path

from daskcnn.errors import DataError
from daskcnn.files import read_regular, replace_file

FILE, RUNS = "jobs.sqlite", "run-dir"
_LONGEST = 1 << 16  # bytes of a path
NETWORK = re.compile(
    r"nfs4?|cifs|smb3|smbfs|ncpfs|afs|coda|9p|ceph|lustre|gpfs|beegfs\w*|glusterfs|orangefs|pvfs2|panfs|wekafs|gfs2?|ocfs2"
    r"|davfs|fuse\.(?!fuse-overlayfs|overlay|mergerfs|ext|ntfs).+"
)
"""File systems whose locks do not hold between machines, or may be lost."""


def usual_folder() -> Path:
    """Return the folder of a spool for which none is given: of the user's state, on this machine."""
    return user_state_path("daskcnn", appauthor=False) / "queue"


class SpoolError(DataError):
    """The spool cannot be used, or a change is not possible."""


def own_folder(folder: Path, *, must_exist: bool) -> None:
    """Make the folder of a spool, for its owner alone. Raises SpoolError."""
    remedy = "give another folder (--spool)"
    try:
        if must_exist and not (folder / FILE).exists():
            raise SpoolError(folder, "no spool of `daskcnn serve` is there", "give the folder that `serve` printed")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid():
            raise SpoolError(folder, "the folder is another user's", remedy)
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise SpoolError(folder, "others may look into it", f"chmod 700 {folder}, or {remedy}")
    except OSError as error:
        raise SpoolError(folder, error.strerror or error, f"{remedy} that may be written") from error
    if NETWORK.fullmatch(kind := file_system(folder)):
        reason = f"it is on a network ({kind}), whose locks do not hold"
        raise SpoolError(folder, reason, "give a folder on a disk of this machine (--spool)")


def file_system(folder: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the kind of the file system that a folder lies on; empty where the system does not say."""
    device = os.stat(folder).st_dev
    with suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return rest.split()[0]
    return ""


def note_runs(folder: Path, runs: Path) -> None:
    """Note the folder of the runs whose job names none, for those who submit beside the service. Raises OSError."""
    replace_file(folder / RUNS, os.fsencode(runs))


def runs_of_spool(folder: Path) -> Path:
    """Return the folder that the service has noted; the usual one of this place where none has."""
    with suppress(OSError, DataError):
        return Path(os.fsdecode(read_regular(folder / RUNS, _LONGEST)))
    return Path("runs").absolute()
