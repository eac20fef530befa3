"""Times as people write them."""

from __future__ import annotations

import pytest

from daskcnn.errors import JobError
from daskcnn.job.resolve import parse_job, resolve


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("1 h 30 min", 5400), ("1.5h", 5400), ("45s", 45),
        ("2 days", 172_800),
        ("1:30:00", 5400), ("36:00:00", 129600), ("1-12:00:00", 129600), (5400, 5400), (0.5, 0.5), ("2H", 7200),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_seconds(text: str | float, seconds: float) -> None:
    assert resolve({"run": {"time_limit": text}}).run.time_limit == seconds


@pytest.mark.parametrize("text", ["90", "1:30", "two hours", "", "h", "-1h", "1:75:00", "2h90", "1e3s", True, [1]])
def test_what_is_no_time_or_has_no_unit_is_refused(text: object) -> None:
    with pytest.raises(JobError, match=r"run\.time_limit"):
        parse_job({"run": {"time_limit": text}})


@pytest.mark.parametrize("seconds", [0, -5, "0h"])
def test_no_time_at_all_is_refused(seconds: object) -> None:
    with pytest.raises(JobError, match=r"run\.time_limit.*greater than 0"):
        parse_job({"run": {"time_limit": seconds}})
