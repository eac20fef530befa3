"""The base of a job's tables."""

from __future__ import annotations

from os.path import expanduser
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema


def _place(text: str) -> str:
    """Return the path of a file or folder, without ~. Raises ValueError for one that no file system has."""
    if "\0" in text:
        raise ValueError("no file or folder has a NUL character in its name; remove it")
    return expanduser(text)


Location = Annotated[str, Field(min_length=1), AfterValidator(_place)]


class Options(BaseModel):
    """A table of options: immutable, no unknown keys, no infinities, no value taken for one of another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Join the lines of the docstrings below the fields: they are the fields' descriptions."""
        for field in cls.__pydantic_fields__.values():
            field.description = field.description and " ".join(field.description.split())
        return handler(source)
