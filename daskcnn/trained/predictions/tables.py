"""Predictions as a file: CSV, Parquet or Zarr. It is written part by part, and renamed into place when it is whole."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.errors import DataError, UserError, installing
from daskcnn.files import sync, sync_tree
from daskcnn.trained.predictions.parts import Predicted
from daskcnn.trained.predictions.sources import Part

_GROUP = 65_536
"""Rows of Parquet that are written together."""
_CHUNK, _CHUNK_BYTES = 16_384, 8 << 20
"""The most rows, and bytes of probabilities, of a chunk of Zarr."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table.

    Attributes
    ----------
    key : "sample" or "file".
    split : whether a column names the part of the data set.
    classes : the network's, in the order of the probabilities.
    labels : names that the data's labels stand for, None where none are known.
    several : whether a sample may have any number of the labels.
    """

    key: str
    split: bool
    classes: tuple[str, ...]
    labels: tuple[str, ...] | None
    several: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all columns, in order."""
        split, label = ["part"] if self.split else [], [] if self.labels is None else ["label"]
        return [*split, self.key, *label, "predicted", *self.probabilities]

    @property
    def probabilities(self) -> list[str]:
        """Names of the columns of probabilities."""
        return [f"p_{text(name)}" for name in self.classes]

    def keys(self, part: Part) -> list[Any]:
        """Return the samples' numbers in their part of the data set, or the files' paths."""
        return [text(file) for file in part.files] if self.key == "file" else list(range(part.lo, part.hi))

    def before(self, part: Part, found: Predicted) -> list[list[Any]]:
        """Return the columns before those of the probabilities.

        The predicted class is the likeliest one, or all labels of at least one half. It is empty for a file that could
        not be read.
        """
        columns = [*([[part.split] * len(part)] if self.split else []), self.keys(part)]
        if self.labels is not None:
            assert found.labels is not None, "known"
            names = self.labels
            if found.labels.ndim == 2:  # as the predicted ones are, to be compared with them
                ours = {name: number for number, name in enumerate(self.classes)}
                order = sorted(range(len(names)), key=lambda n: ours.get(names[n], len(ours) + n))
                columns.append([_joined([names[n] for n in order], row) for row in found.labels[:, order]])
            else:
                columns.append([text(names[number]) for number in found.labels])
        if self.several:
            columns.append([_joined(self.classes, row >= 0.5) for row in found.probabilities])
        else:
            columns.append(["" if number < 0 else text(self.classes[number]) for number in likeliest(found)])
        return columns

    def numbered(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return labels by the network's classes: numbers, -1 for a class that it has not, or rows of 0 and 1."""
        assert self.labels is not None, "known"
        if self.several:
            columns = {name: labels[:, number] for number, name in enumerate(self.labels)}
            none = np.zeros(len(labels), np.uint8)
            return np.stack([columns.get(name, none) for name in self.classes], axis=1)
        ours = {name: number for number, name in enumerate(self.classes)}
        return np.array([ours.get(name, -1) for name in self.labels], np.int64)[labels]


def likeliest(found: Predicted) -> npt.NDArray[np.int64]:
    """Return the number of the likeliest class of each sample, -1 for a file that could not be read."""
    numbers = np.where(np.isnan(found.probabilities), -1, found.probabilities).argmax(axis=1)
    return np.where(np.isnan(found.probabilities).all(axis=1), -1, numbers)


def text(name: str) -> str:
    """Return a name as UTF-8 can have it: bytes of a path that are none appear as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _joined(names: Sequence[str], chosen: npt.NDArray[Any]) -> str:
    return ";".join(text(name) for name, yes in zip(names, chosen, strict=True) if yes)


Write = Callable[[Part, Predicted], None]
"""Writes the rows of a part. Parts come in order."""


@contextmanager
def csv_table(path: Path, columns: Columns, rows: int) -> Iterator[Write]:
    """Open comma-separated values with a line of names, in UTF-8; probabilities have the digits that float32 needs."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns.names)

        def write(part: Part, found: Predicted) -> None:
            for *first, numbers in zip(*columns.before(part, found), found.probabilities, strict=True):
                writer.writerow([*first, *(f"{p:.9g}" for p in numbers.tolist())])

        yield write


@contextmanager
def parquet_table(path: Path, columns: Columns, rows: int) -> Iterator[Write]:
    """Open a Parquet file, which pyarrow writes several parts at a time."""
    pa, parquet = _pyarrow()
    types = {name: pa.string() for name in columns.names} | dict.fromkeys(columns.probabilities, pa.float32())
    types |= {columns.key: pa.int64()} if columns.key == "sample" else {}
    schema, waiting = pa.schema([(name, types[name]) for name in columns.names]), []

    with parquet.ParquetWriter(path, schema) as writer:

        def write(part: Part, found: Predicted) -> None:
            arrays = [*columns.before(part, found), *np.ascontiguousarray(found.probabilities.T)]
            made = [pa.array(values, type=field.type) for values, field in zip(arrays, schema, strict=True)]
            waiting.append(pa.Table.from_arrays(made, schema=schema))
            if sum(map(len, waiting)) >= _GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()

        yield write
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


@contextmanager
def zarr_table(path: Path, columns: Columns, rows: int) -> Iterator[Write]:
    """Open a Zarr group: `probabilities` (N, classes), `predicted`, `sample` or `file`, `label` and `part` if known.

    `predicted` and `label` are numbers of the network's classes, or rows of 0 and 1 where a sample may have several
    labels. A file that could not be read has -1, and so has a label that the network does not know. The attribute
    `classes` holds the names. Chunks are written whole: each is compressed once.
    """
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"classes": list(columns.classes)})
    wide = len(columns.classes)
    chunk = max(1, min(_CHUNK, rows, _CHUNK_BYTES // (4 * wide)))
    kinds: dict[str, tuple[tuple[int, ...], Any]] = {"probabilities": ((rows, wide), np.float32)}
    kinds["predicted"] = ((rows, wide), np.uint8) if columns.several else ((rows,), np.int64)
    kinds[columns.key] = (rows,), "string" if columns.key == "file" else np.int64
    kinds |= {"part": ((rows,), "string")} if columns.split else {}
    if columns.labels is not None:
        kinds["label"] = kinds["predicted"]
    arrays = {
        name: group.create_array(name, shape=shape, chunks=(chunk, *shape[1:]), dtype=dtype)
        for name, (shape, dtype) in kinds.items()
    }
    written, waiting = 0, list[dict[str, Any]]()

    def count() -> int:
        return sum(len(values["predicted"]) for values in waiting)

    def flush(several: int) -> None:
        nonlocal written
        together = {name: np.concatenate([values[name] for values in waiting]) for name in arrays}
        for name, array in arrays.items():
            array[written : written + several] = together[name][:several]
        waiting[:] = [{name: values[several:] for name, values in together.items()}]
        written += several

    def write(part: Part, found: Predicted) -> None:
        waiting.append(
            {
                "probabilities": found.probabilities,
                "predicted": (found.probabilities >= 0.5).astype(np.uint8) if columns.several else likeliest(found),
                columns.key: np.array(columns.keys(part), object if columns.key == "file" else np.int64),
                "label": None if found.labels is None else columns.numbered(found.labels),
                "part": np.full(len(part), part.split, object),
            }
        )
        if (several := count()) >= chunk:
            flush(several - several % chunk)

    yield write
    if several := count():
        flush(several)


TABLES: Mapping[str, Callable[[Path, Columns, int], AbstractContextManager[Write]]] = {
    ".csv": csv_table,
    ".parquet": parquet_table,
    ".zarr": zarr_table,
}
"""By the suffix of the file: (path, columns, number of rows) -> the open table."""


def check_table(out: Path) -> None:
    """Raise UserError for a file that a table cannot be written to."""
    if out.suffix not in TABLES:
        raise DataError(out, "its format is not known", f"end its name with one of {', '.join(TABLES)}")
    if os.path.lexists(out):
        raise DataError(out, "exists already", "remove it, or give another name")
    if not out.parent.is_dir():
        raise DataError(out, f"there is no folder {out.parent}", "make it, or give another name")
    if out.suffix == ".parquet":
        _pyarrow()


def write_table(out: Path, columns: Columns, rows: int, parts: Iterable[tuple[Part, Predicted]]) -> None:
    """Write the parts, pairs of `Part` and `Predicted` in order, to a file that appears when it is whole.

    Raises DataError where another has appeared there meanwhile.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    _remove(temporary)
    try:
        with TABLES[out.suffix](temporary, columns, rows) as write:
            for part, found in parts:
                write(part, found)
        (sync_tree if temporary.is_dir() else sync)(temporary)
        _place(temporary, out)
        sync(out.parent)
    except BaseException:
        _remove(temporary)
        raise


def _place(temporary: Path, out: Path) -> None:
    """Give a whole table its name. Renaming would replace a file of that name; linking does not."""
    if not temporary.is_dir():
        try:
            os.link(temporary, out)
        except OSError:  # the name is taken, or the file system has no links
            pass
        else:
            temporary.unlink()
            return
    if os.path.lexists(out):
        remedy = "remove it: the same command goes on with what is predicted"
        raise DataError(out, "has appeared while the table was made", remedy)
    os.rename(temporary, out)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        remedy = f"{installing('parquet')}, or write to a name that ends in .csv or .zarr"
        raise UserError("package pyarrow", "it is not installed", remedy) from error
    return pyarrow, pyarrow.parquet
