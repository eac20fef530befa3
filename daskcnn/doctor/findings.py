"""Findings of `daskcnn doctor`, each with its remedy, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from daskcnn.errors import UserError, told

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check. `ok`: a job would start, if not as well as it might where there is a remedy."""

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
        """Return plain data."""
        return asdict(self)


def failed(check: str, error: UserError | OSError) -> Finding:
    """Return the finding that an error stands for."""
    if isinstance(error, OSError):
        return Finding(check, False, str(error), "restart what does not answer")
    return Finding(check, False, told(error.value, error.reason, ""), error.remedy)


def in_short(error: BaseException) -> str:
    """Return an error's message on one line, shortened."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def gib(nbytes: int) -> str:
    """Return GiB with one decimal, or two below 1 GiB."""
    return f"{nbytes / GIB:.1f}" if nbytes >= GIB else f"{nbytes / GIB:.2f}"


def readable_findings(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, with the remedy under it, and a last one that says if a job would start."""
    width = max(len(f.check) for f in findings)
    lines: list[str] = []
    for f in findings:
        lines.append(f"{f.mark:<3} {f.check:<{width}}  {f.seen}")
        lines += [f"    {'':<{width}}  → {f.remedy}"] if f.remedy else []
    return "\n".join([*lines, "", _conclusion(findings)])


def _conclusion(findings: Sequence[Finding]) -> str:
    against = "; ".join(f"{f.check}: {f.seen}" for f in findings if not f.ok)
    if not would_start(findings):
        return f"a job would not start ({against})"
    better = ", ".join(dict.fromkeys(f.check for f in findings if f.remedy))
    if any(f.facts.get("too_few_free") for f in findings):
        return f"a job would wait for workers (see the remedy of {better})"
    return f"a job would start (see the remedy of {better})" if better else "a job would start"


def would_start(findings: Sequence[Finding]) -> bool:
    """Return True if a job would start."""
    return all(f.ok for f in findings)
