"""The base of a job's tables."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _place(text: str) -> str:
    """Return the path of a file or folder, without ~. Raises ValueError for one that no file system has."""
    if "\0" in text:
        raise ValueError("no file or folder has a NUL character in its name; remove it")
    return expanduser(text)


Location = Annotated[str, Field(min_length=1), AfterValidator(_place)]


class Options(BaseModel):
    """A table of options: immutable, no unknown keys, no infinities, no value taken for one of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def meaning_of(table: type[BaseModel], key: str) -> str:
    """Return the description of a table's key: the field's own, or the docstring below it; empty if it has none.

    Pydantic's `use_attribute_docstrings` parses the source where a class is made. In two threads of a worker at once
    CPython 3.11 fails at that (SystemError: AST constructor recursion depth mismatch), and the worker with it.
    """
    name, field = next((name, own) for name, own in table.model_fields.items() if key in (name, own.alias))
    docstrings = (_docstrings(cls.__module__).get((cls.__name__, name)) for cls in table.__mro__)
    return field.description or next(filter(None, docstrings), "")


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below the fields of a module's classes, each in one line, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # it has no source that can be read
        return {}
    return {
        (cls.name, field.target.id): " ".join(text.value.split())
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for field, below in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(text := below.value, ast.Constant) and isinstance(text.value, str)
    }
