"""Small pieces of HTML that show objects in a notebook. Every text in them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from daskcnn.errors import escaped


def as_table(title: str, rows: Iterable[Sequence[object]], *, head: Sequence[str] = ()) -> str:
    """A table with a title; `head` names its columns."""
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = [f"<tr>{top}</tr>"] if head else []
    lines += [f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><caption><b>{_text(title)}</b></caption>{''.join(lines)}</table>"


def as_lines(title: str, text: str) -> str:
    """Lines as they are, with a title above them."""
    return f"<div><b>{_text(title)}</b><pre>{_text(text)}</pre></div>"


def _text(value: object) -> str:
    return escape(escaped(str(value), keep="\n"))
