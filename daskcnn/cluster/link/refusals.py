"""What a task refuses for a reason that a user can mend: it comes back as a value, and the driver raises it.

Dask prints a traceback on the worker for every exception that a task raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from daskcnn.errors import PushRefused, UserError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Refusal:
    """A task's result where there is none: the error that says why."""

    error: UserError | PushRefused


def returns_refusals(task: Callable[P, R]) -> Callable[P, R | Refusal]:
    """The task with refusals as values. Its result must go to the driver: `Results` raises them there."""

    @wraps(task)
    def made(*args: P.args, **kwargs: P.kwargs) -> R | Refusal:
        try:
            return task(*args, **kwargs)
        except (UserError, PushRefused) as error:
            return Refusal(error)

    return made
