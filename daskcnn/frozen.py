"""Frozen data that is made for every round of thousands of workers, and a way to compare parts of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a dataclass with slots that the type checker holds for frozen.

    At run time nothing forbids to assign to its fields: a frozen dataclass takes four to seven times as long to make,
    as each field is set by a call. Everything else is as in a frozen dataclass, equality and hash among it.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Stated:
    """Frozen data that tests compare by the fields that matter to them."""

    __slots__ = ()

    @classmethod
    def match(cls, **fields: Any) -> Match:
        """Return an object that equals every instance with these values, whatever its other fields hold."""
        return Match(cls, fields)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """An instance of `kind` of which only some fields are stated."""

    kind: type
    fields: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        if type(other) is not self.kind:
            return NotImplemented
        return all(getattr(other, name) == value for name, value in self.fields.items())
