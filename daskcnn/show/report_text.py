"""A report in aligned text for people."""

from __future__ import annotations

from daskcnn.show.report_sections import sections
from daskcnn.show.report_tables import RunReport
from daskcnn.show.text_table import Section

MOST = 24
"""Rows of a table, where they are not asked for in full."""


def format_report(report: RunReport, *, full: bool = False) -> str:
    """All tables of a run. full: with one of every worker's rounds, and no table shortened."""
    found = sections(report, most=None if full else MOST, rounds=full)
    return "\n\n".join("\n".join(_lines(part)) for part in found)


def _lines(part: Section) -> list[str]:
    """Lines with their labels; a table under its title, indented."""
    facts = [f"{label:<12}{value}" for label, value in part.facts]
    table = part.table.lines() if part.table else []
    title = [part.title] if part.title else []
    return [*title, *facts, *(f"  {line}".rstrip() for line in table)]
