"""Frozen data that is made for every round of thousands of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A dataclass with slots that the type checker holds for frozen.

    At run time nothing forbids to assign to its fields: a frozen dataclass takes four to seven times as long to make,
    as each field is set by a call. Everything else is as in a frozen dataclass, equality and hash among it.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
