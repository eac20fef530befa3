"""Array files of NumPy as arrays, without reading them whole: `daskcnn data prepare arrays`."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.files import check_regular

_REMEDY = "give a .npy or .npz file, as NumPy's save writes it"


@contextmanager
def opened(path: str) -> Iterator[npt.NDArray[Any]]:
    """The array of a `.npy` file, or of a `.npz` file as `FILE.npz:NAME`, mapped into memory.

    The name may be left out where the file holds one array. A packed array is unpacked to a temporary folder first.
    Raises DataError for anything else, for objects, and for a file that is shorter than its header says.
    """
    file, _, name = path.rpartition(":") if ".npz:" in path else (path, "", "")
    with ExitStack() as stack:
        if file.endswith(".npz"):
            file = str(_unpacked(file, name, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="daskcnn-")))))
        yield _mapped(file, path)


def _mapped(file: str, told: str) -> npt.NDArray[Any]:
    try:
        check_regular(file)
        found = np.load(file, mmap_mode="r", allow_pickle=False, max_header_size=10_000)
    except OSError as error:
        raise DataError(told, error.strerror or error, _REMEDY) from error
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, OverflowError, EOFError) as error:
        raise DataError(told, f"not an array file that can be read ({error!s:.120})", _REMEDY) from error
    if not isinstance(found, np.ndarray):
        raise DataError(told, "not an array file", _REMEDY)
    return found


def _unpacked(file: str, name: str, folder: Path) -> Path:
    """The array of this name, as a file in the folder, no longer than its entry says."""
    try:
        check_regular(file)
        with zipfile.ZipFile(file) as archive:
            entry = _entry(archive, name, file)
            free = shutil.disk_usage(folder).free
            if entry.file_size > free:
                reason = f"{entry.filename!r:.80} has {entry.file_size:,} bytes, {free:,} are free in {folder.parent}"
                raise DataError(file, reason, "set TMPDIR to a folder with more room, or give a .npy file")
            out = folder / "array.npy"
            with archive.open(entry) as source, out.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            return out
    except OSError as error:
        raise DataError(file, error.strerror or error, _REMEDY) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise DataError(file, f"not an archive of arrays that can be read ({error!s:.120})", _REMEDY) from error


def _entry(archive: zipfile.ZipFile, name: str, file: str) -> zipfile.ZipInfo:
    entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if name and name in entries:
        return entries[name]
    if not name and len(entries) == 1:
        return next(iter(entries.values()))
    names = ", ".join(map(repr, list(entries)[:20]))
    raise DataError(file, f"holds {len(entries)} arrays ({names})", f"choose one, as {file}:NAME")
