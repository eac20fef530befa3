"""What a worker is called, in a run and by the doctor: by its user's name, else by its kind and a number.

Every name is decided here. Two workers never share one, and each can be part of a file's name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from itertools import count

LONGEST = 60
"""Letters of a name; the rest of a longer one is cut off."""
_ALLOWED = "._-+@"
_MADE = re.compile(r"(cpu|gpu|ps)-\d+")  # by this module, and for the workers of a local cluster
_RESERVED = re.compile(r"group-\d+|layer")  # what else trains in a run has such names


def given_name(name: object) -> str:
    """The name that a user gave a worker, as it is shown and kept; empty where none was given.

    Dask calls a worker without a name by its address, and `LocalCluster` by a number. Characters that may not be part
    of a file's name become hyphens.
    """
    if not isinstance(name, str) or "://" in name:
        return ""
    letters = unicodedata.normalize("NFC", name)
    found = "".join(c if c.isalnum() or c in _ALLOWED else "-" for c in letters).strip(".-")[:LONGEST]
    return f"worker-{found}" if _RESERVED.fullmatch(found) else found


def unique_names(given: Sequence[str], kinds: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """A name for each worker: the given one, or where that is empty one such as `cpu-0`.

    A given name that is taken already gets a number. taken: names that none of them may have.
    """
    used = set(taken)
    names = [_added(used, _free(name, kind, used)) if name else "" for name, kind in zip(given, kinds, strict=True)]
    return [name or _added(used, _made(kind, used)) for name, kind in zip(names, kinds, strict=True)]


def _free(name: str, kind: str, used: Collection[str]) -> str:
    if name not in used:
        return name
    if _MADE.fullmatch(name):
        return _made(kind, used)
    return next(each for number in count(2) if (each := f"{name}-{number}") not in used)


def _made(kind: str, used: Collection[str]) -> str:
    return next(name for number in count() if (name := f"{kind}-{number}") not in used)


def _added(used: set[str], name: str) -> str:
    used.add(name)
    return name
