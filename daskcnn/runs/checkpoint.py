"""Checkpoints: after a crash at any moment the previous or the new one loads, never a mixture.

A checkpoint is a folder `step-…` of two files:

    arrays.safetensors   every named array
    state.json           step, score and state; size and SHA-256 of the arrays, and of itself

It is written under a temporary name, synced and renamed in one step, and renamed to such a name before it is removed.
Temporary names are never loaded; the next `save` removes them. The run's lock keeps out a second writer. The header of
the arrays is checked before anything is allocated; safetensors' own reader takes three times the file's size.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors.numpy import save as encode

from daskcnn.documents import Bounds, dumps, first_problem, parse_json, read_json, unknown_keys
from daskcnn.errors import DataError
from daskcnn.files import open_regular, sync, write_synced

Arrays = dict[str, npt.NDArray[Any]]

REMEDY = "take another checkpoint of the run"
BOUNDS = Bounds(size=4 << 20, values=1 << 19, tables=1 << 17)  # bounds of a header: 40,000 arrays

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "|b1"}
_DTYPES |= {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"}
_DTYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"}


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of an array: the bytes from `start` to `stop` behind the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


Header = Mapping[str, Stored]


def read_header(
    source: BufferedReader, file: Path, size: int, *, remedy: str = REMEDY, bounds: Bounds = BOUNDS
) -> tuple[Header, Mapping[str, str]]:
    """Return the places of the arrays, in their order, and the metadata. Raises DataError for a damaged file."""
    actual = os.fstat(source.fileno()).st_size
    if actual != size:
        raise DataError(file, f"{actual:,} bytes, not {size:,} as written", remedy)
    length = int.from_bytes(source.read(8), "little")
    if length > min(size - 8, bounds.size):
        raise DataError(file, f"a header of {length:,} bytes, more than the file allows", remedy)
    found = parse_json(source.read(length), f"{file}: header", remedy=remedy, bounds=bounds)
    try:
        metadata = found.get("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are no table of strings")
        entries = [(name, _stored(entry)) for name, entry in found.items() if name != "__metadata__"]
        entries.sort(key=lambda entry: (entry[1].start, entry[1].stop))
        end = 0
        for name, stored in entries:  # one behind the other
            if stored.start != end:
                raise ValueError(f"{name:.40} starts at {stored.start}, the array before ends at {end}")
            end = stored.stop
        if end != size - 8 - length:
            raise ValueError(f"arrays of {end} bytes in {size - 8 - length}")
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(file, f"not a safetensors file ({type(error).__name__}: {error!s:.80})", remedy) from error
    return dict(entries), metadata


def _stored(entry: Mapping[str, Any]) -> Stored:
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError("a shape or an offset is no whole number")
    if prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"an array of shape {shape} in {stop - start} bytes")
    return Stored(dtype, shape, start, stop)


Wanted = Callable[[str], bool]


def every(name: str) -> bool:
    """Want each array."""
    return True


def read_arrays(source: BufferedReader, header: Header, size: int, wanted: Wanted = every) -> Arrays:
    """Return the wanted arrays, which may be written to. Raises OSError where the file has become shorter meanwhile."""
    begin = size - max((stored.stop for stored in header.values()), default=0)
    arrays = {}
    for name, stored in header.items():
        if not wanted(name):
            continue
        source.seek(begin + stored.start)
        array = np.empty(stored.shape, stored.dtype)
        if array.nbytes and source.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
            raise OSError("the file ends too early")
        arrays[name] = array.astype(stored.dtype.newbyteorder("="), copy=False)
    return arrays


Warn = Callable[[str], None]
Check = Callable[[Mapping[str, Any], Header, Path], None]
"""Raises DataError for an unexpected state or header of a checkpoint, before its arrays are read."""

_ARRAYS, _STATE, _TEMPORARY = "arrays.safetensors", "state.json", "tmp-"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that a run is resumed from. path: of its folder, if it was loaded.

    state: JSON: NaN is kept as None, tuples as lists, keys as strings; score: on validation samples, higher is better.
    """

    arrays: Arrays
    state: dict[str, Any]
    step: int
    score: float | None = None
    path: Path | None = None


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _ArraysFile(_Strict):
    bytes: NonNegativeInt
    sha256: str


class _Document(_Strict):
    format: Literal[1]
    step: NonNegativeInt
    score: float | None
    state: dict[str, Any]
    arrays: _ArraysFile
    sha256: str


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = 3) -> Path:
    """Write a checkpoint into `folder` and return its path; the last `keep` and the best one stay, others go.

    Those of the same or a later step go too: the run has gone back. An OSError leaves every earlier one as it was.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: the checkpoint just written must stay; set run.keep to 1 or more")
    folder.mkdir(parents=True, exist_ok=True)
    _clean_up(folder)
    target = _free_name(folder, checkpoint.step)
    temporary = folder / f"{_TEMPORARY}{target.name}"
    try:
        temporary.mkdir()
        _write(temporary, checkpoint)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk has its space back
        raise
    sync(folder)
    _prune(folder, target, keep)
    return target


def load(path: Path, *, check: Check | None = None, wanted: Wanted = every) -> Checkpoint:
    """Return the checkpoint in a folder, with checksums and sizes verified. Raises DataError for a damaged file.

    wanted: the arrays to keep in memory, by name; the checksum is of all.
    """
    document = _read_document(path)
    arrays = _read_arrays(path, document, check, wanted)
    return Checkpoint(arrays, document.state, document.step, document.score, path)


def latest(folder: Path, *, warn: Warn, check: Check | None = None, wanted: Wanted = every) -> Checkpoint | None:
    """Return the newest whole checkpoint that passes `check`; None if there is none at all.

    warn: is told of each damaged one. wanted: as for `load`. Raises DataError if all are damaged.
    """
    return _first_whole(reversed(_entries(folder)), warn, check, wanted)


def best(folder: Path, *, warn: Warn, check: Check | None = None, wanted: Wanted = every) -> Checkpoint | None:
    """Return the whole checkpoint of the highest score, the later of equals; otherwise as `latest`."""
    scores, unread = _scores(_entries(folder))
    for error in unread.values():
        warn(f"checkpoint passed over, its score is not known: {error}")
    by_score = sorted(scores, key=lambda path: (scores[path], _order(path)), reverse=True)
    return _first_whole(by_score, warn, check, wanted)


def _first_whole(paths: Iterable[Path], warn: Warn, check: Check | None, wanted: Wanted) -> Checkpoint | None:
    damage: DataError | None = None
    for path in paths:
        try:
            return load(path, check=check, wanted=wanted)
        except DataError as error:
            damage = error
            warn(f"checkpoint passed over: {error}")
    if damage is not None:
        raise DataError(reason="no checkpoint is whole", remedy=f"the last one tried: {damage}; start the run anew")
    return None


# --- writing ---


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    # in native byte order and C order: safetensors copies the bytes behind an array without a look at strides
    found = checkpoint.arrays.items()
    data = encode({name: np.asarray(a, dtype=a.dtype.newbyteorder("="), order="C") for name, a in found})
    write_synced(folder / _ARRAYS, data)
    document = {
        "format": 1,
        "step": checkpoint.step,
        "score": checkpoint.score,
        "state": checkpoint.state,
        "arrays": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
    }
    write_synced(folder / _STATE, dumps({**document, "sha256": _digest(document)}, indent=1).encode())
    sync(folder)


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(dumps(document, sort_keys=True).encode()).hexdigest()


def _free_name(folder: Path, step: int) -> Path:
    """`step-000000375`, or `step-000000375-2` when a run that went back writes the same step again."""
    if step < 0:
        raise ValueError(f"step={step}: a checkpoint's step counts from 0")
    path, number = folder / f"step-{step:09d}", 2
    while path.exists():
        path, number = folder / f"step-{step:09d}-{number}", number + 1
    return path


# --- reading ---


def _read_document(path: Path) -> _Document:
    file = path / _STATE
    document = read_json(file, remedy=REMEDY)
    if not isinstance(document, dict):
        raise DataError(file, "not a JSON object", REMEDY)
    if (key := unknown_keys(document, _Document.model_fields)) is not None:
        raise DataError(file, f"not a checkpoint of this version ({key:.80}: unknown key)", REMEDY)
    try:
        actual = _digest({key: value for key, value in document.items() if key != "sha256"})
        if actual != document.get("sha256"):
            raise DataError(file, f"SHA-256 is {actual}, not {document.get('sha256')!r:.80} as written", REMEDY)
        return _Document.model_validate(document)
    except ValidationError as error:
        raise DataError(file, f"not a checkpoint of this version ({first_problem(error)})", REMEDY) from error
    except (ValueError, RecursionError) as error:  # a number that JSON does not allow
        raise DataError(file, f"damaged ({error})", REMEDY) from error


def _read_arrays(path: Path, document: _Document, check: Check | None, wanted: Wanted) -> Arrays:
    """The arrays, once their header, its contents and the checksum were found right: a lie allocates nothing."""
    file, recorded = path / _ARRAYS, document.arrays
    try:
        with open_regular(file) as source:
            header, _ = read_header(source, file, recorded.bytes)
            if check is not None:
                check(document.state, header, path)
            source.seek(0)
            actual = hashlib.file_digest(source, "sha256").hexdigest()
            if actual != recorded.sha256:
                raise DataError(file, f"SHA-256 is {actual}, not {recorded.sha256:.80} as written", REMEDY)
            return read_arrays(source, header, recorded.bytes, wanted)
    except OSError as error:
        raise DataError(file, error.strerror or error, REMEDY) from error
    except MemoryError as error:
        raise DataError(file, f"{recorded.bytes:,} bytes, more than this machine has memory", REMEDY) from error


# --- which checkpoints there are ---


def _entries(folder: Path) -> list[Path]:
    """The folder's checkpoints, oldest step first."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [Path(e) for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _scores(paths: Iterable[Path]) -> tuple[dict[Path, float], dict[Path, DataError]]:
    """The scores of those that have one, and the errors of those that cannot be read."""
    scores, unread = dict[Path, float](), dict[Path, DataError]()
    for path in paths:
        try:
            score = _read_document(path).score
        except DataError as error:
            unread[path] = error
        else:
            scores |= {} if score is None else {path: score}
    return scores, unread


def _prune(folder: Path, new: Path, keep: int) -> None:
    """Remove other checkpoints. Never raises: the new one is safe, and space is the next save's concern.

    One whose score cannot be read stays: it may be the best, and a disk that fails now may be read later.
    """
    entries = _entries(folder)
    current = [path for path in entries if path == new or _order(path)[0] < _order(new)[0]]
    scores, unread = _scores(current)
    best_one = max(scores, key=lambda path: (scores[path], _order(path)), default=new)
    kept = {*current[-keep:], *unread, best_one}
    for path in entries:
        if path not in kept:
            with suppress(OSError):
                os.rename(path, folder / f"{_TEMPORARY}removed-{path.name}")
    _clean_up(folder)


def _clean_up(folder: Path) -> None:
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
