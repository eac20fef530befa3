"""What `daskcnn doctor` says: findings, each with its remedy, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from daskcnn.errors import UserError, told

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether a job would start, what was seen, and what to do about it where something is.

    With `ok` and a remedy, the job would start, but not do as well as it might. facts: figures, for `--json`.
    """

    check: str
    ok: bool
    seen: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """The finding's mark in the printed list."""
        return "NO" if not self.ok else "!" if self.remedy else "ok"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def failed(check: str, error: UserError | OSError) -> Finding:
    """What an error says."""
    if isinstance(error, OSError):
        return Finding(check, False, str(error), "restart what does not answer")
    return Finding(check, False, told(error.value, error.reason, ""), error.remedy)


def gib(nbytes: int) -> str:
    """GiB with a digit behind the point, two where they are few."""
    return f"{nbytes / GIB:.1f}" if nbytes >= GIB else f"{nbytes / GIB:.2f}"


def readable_findings(findings: Sequence[Finding]) -> str:
    """A line a finding, the remedy under it; the last line says whether a job would start."""
    width = max(len(f.check) for f in findings)
    lines: list[str] = []
    for f in findings:
        lines.append(f"{f.mark:<3} {f.check:<{width}}  {f.seen}")
        lines += [f"    {'':<{width}}  → {f.remedy}"] if f.remedy else []
    return "\n".join(lines)


def would_start(findings: Sequence[Finding]) -> bool:
    """Whether a job would start."""
    return all(f.ok for f in findings)
