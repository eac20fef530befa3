"""Names of data sets that users make, and the paths that follow from them."""

from __future__ import annotations

import os
from pathlib import Path

from daskcnn.errors import DataError, escaped


def check_name(name: object) -> None:
    """Raise DataError for a name that is empty, or that cannot be printed."""
    if not isinstance(name, str) or not name or escaped(name) != name:
        raise DataError(f"name={name!r}", "a name has one printable character or more", "give another name")


def name_of(store: str) -> str:
    """Return the usual name of the data set at this path or URL: that of the store."""
    return escaped(Path(store.rstrip("/")).stem) or "images"


def path_of(name: str) -> str:
    """Return the usual path of the data set of this name. Raises DataError where the name is no file's."""
    if os.path.basename(name) != name or name in ("", ".", ".."):
        remedy = "say where the data set goes: out=PATH in Python, --out PATH on the command line"
        raise DataError(f"name={name!r}", "the name of no file", remedy)
    return f"data/{name}.zarr"
