"""Predictions as a file: CSV, Parquet or Zarr. It is written a part at a time, and takes its place when it is whole."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import zarr

from daskcnn.errors import DataError, UserError, installing
from daskcnn.trained.predictions.parts import Columns, Predicted, likeliest
from daskcnn.trained.predictions.sources import Part

_GROUP = 65_536
"""Rows of Parquet that are written together."""
_CHUNK = 16_384
"""Rows of a chunk of Zarr."""


class Table(Protocol):
    """A table that is being written; parts come in order. It is a context manager that closes its file."""

    def write(self, part: Part, found: Predicted) -> None:
        """Write the rows of a part."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class CsvTable:
    """Comma-separated values with a line of names, in UTF-8; probabilities have the digits that float32 needs."""

    def __init__(self, path: Path, columns: Columns, rows: int) -> None:
        self._columns = columns
        self._file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 `__exit__` closes it
        self._writer = csv.writer(self._file)
        self._writer.writerow(columns.names)

    def write(self, part: Part, found: Predicted) -> None:
        """Write the rows of a part."""
        columns = self._columns
        texts = [columns.keys(part)]
        texts += [] if columns.labels is None else [columns.label_texts(found)]
        texts.append(columns.predicted_texts(found))
        split = [part.split] if columns.split else []
        for *first, numbers in zip(*texts, found.probabilities, strict=True):
            self._writer.writerow([*split, *first, *(f"{p:.9g}" for p in numbers.tolist())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class ParquetTable:
    """Parquet, by pyarrow."""

    def __init__(self, path: Path, columns: Columns, rows: int) -> None:
        self._pa, parquet = _pyarrow()
        self._columns = columns
        self._waiting: list[Any] = []
        self._rows = 0
        self._writer = parquet.ParquetWriter(path, self._schema())

    def _schema(self) -> Any:
        pa, columns = self._pa, self._columns
        types = {name: pa.string() for name in columns.names} | dict.fromkeys(columns.probabilities, pa.float32())
        types |= {columns.key: pa.int64()} if columns.key == "sample" else {}
        return pa.schema([(name, types[name]) for name in columns.names])

    def write(self, part: Part, found: Predicted) -> None:
        """Write the rows of a part, several parts at a time."""
        columns, arrays = self._columns, []
        arrays += [[part.split] * len(part)] if columns.split else []
        arrays.append(columns.keys(part))
        arrays += [] if columns.labels is None else [columns.label_texts(found)]
        arrays.append(columns.predicted_texts(found))
        arrays += list(np.ascontiguousarray(found.probabilities.T))
        schema = self._schema()
        made = [self._pa.array(values, type=field.type) for values, field in zip(arrays, schema, strict=True)]
        self._waiting.append(self._pa.Table.from_arrays(made, schema=schema))
        self._rows += len(part)
        if self._rows >= _GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(self._pa.concat_tables(self._waiting))
        self._waiting, self._rows = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._flush()
        self._writer.close()


class ZarrTable:
    """A Zarr group: `probabilities` (N, classes), `predicted`, `sample` or `file`, `label` and `part` where there are.

    `predicted` and `label` are class numbers, -1 for a file that could not be read, or rows of 0 and 1 where a sample
    may have several labels. The attributes hold the names.
    """

    def __init__(self, path: Path, columns: Columns, rows: int) -> None:
        self._columns, self._at = columns, 0
        names = {"classes": columns.classes, "labels": columns.labels}
        group = zarr.open_group(path, mode="w", zarr_format=3, attributes={k: list(v) for k, v in names.items() if v})
        wide = len(columns.classes)
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {"probabilities": ((rows, wide), np.float32)}
        kinds["predicted"] = ((rows, wide), np.uint8) if columns.several else ((rows,), np.int64)
        kinds[columns.key] = (rows,), "string" if columns.key == "file" else np.int64
        kinds |= {"part": ((rows,), "string")} if columns.split else {}
        if columns.labels is not None:
            kinds["label"] = ((rows, len(columns.labels)), np.uint8) if columns.several else ((rows,), np.int64)
        self._arrays = {
            name: group.create_array(name, shape=shape, chunks=(min(_CHUNK, rows), *shape[1:]), dtype=dtype)
            for name, (shape, dtype) in kinds.items()
        }

    def write(self, part: Part, found: Predicted) -> None:
        """Write the rows of a part."""
        columns, place = self._columns, slice(self._at, self._at + len(part))
        values: dict[str, Any] = {
            "probabilities": found.probabilities,
            "predicted": (found.probabilities >= 0.5).astype(np.uint8) if columns.several else likeliest(found),
            columns.key: np.array(columns.keys(part), object if columns.key == "file" else np.int64),
            "label": found.labels,
            "part": np.full(len(part), part.split, object),
        }
        for name, array in self._arrays.items():
            array[place] = values[name]
        self._at = place.stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


TABLES: Mapping[str, Callable[[Path, Columns, int], Table]] = {
    ".csv": CsvTable,
    ".parquet": ParquetTable,
    ".zarr": ZarrTable,
}
"""By the suffix of the file: (path, columns, number of rows) -> the table."""


def check_table(out: Path) -> None:
    """Raise UserError for a file that no table is written to, before anything starts."""
    if out.suffix not in TABLES:
        raise DataError(out, "its format is not known", f"end its name with one of {', '.join(TABLES)}")
    if os.path.lexists(out):
        raise DataError(out, "exists already", "remove it, or give another name")
    if not out.parent.is_dir():
        raise DataError(out, f"there is no folder {out.parent}", "make it, or give another name")
    if out.suffix == ".parquet":
        _pyarrow()


def write_table(out: Path, columns: Columns, rows: int, parts: Any) -> None:
    """Write the parts, pairs of `Part` and `Predicted` in order, to a file that is there when it is whole."""
    temporary = out.with_name(f".{out.name}.tmp")
    _remove(temporary)
    try:
        with TABLES[out.suffix](temporary, columns, rows) as table:
            for part, found in parts:
                table.write(part, found)
        os.rename(temporary, out)
    except BaseException:
        _remove(temporary)
        raise


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
