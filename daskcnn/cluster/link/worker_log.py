"""What Dask logs on workers that this package starts, and a user should not see."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from daskcnn.errors import UserError


def quiet_refusals() -> None:
    """From now on, Dask's log of this process has no line of a task that refuses a user's data or cluster."""
    logging.getLogger("distributed.worker").addFilter(_is_no_refusal)  # a filter is there once at most


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """The driver raises what a task has raised. Dask logs it with a traceback besides."""
    if not str(record.msg).startswith("Compute Failed") or not isinstance(record.args, tuple):
        return True
    raised = [text.partition("(")[0] for text in record.args if isinstance(text, str)]
    return not any(kind.__name__ in raised for kind in _kinds(UserError))


def _kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)
