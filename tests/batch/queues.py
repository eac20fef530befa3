"""Submissions for tests of a queue."""

from __future__ import annotations

from itertools import count
from typing import Any

from daskcnn.batch.records import Count, Submission

_TOKENS = count()


def submission(**values: Any) -> Submission:
    """A job that wants one CPU worker."""
    usual: dict[str, Any] = {"token": f"token-{next(_TOKENS)}", "user": "ann", "content": {}, "workers": {"cpu": ONE}}
    return Submission(**usual | values)


ONE = Count(1, 1)
