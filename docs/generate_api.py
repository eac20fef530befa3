"""Write docs/api.md, the reference of what Python code may use, from the docstrings of `daskcnn.__all__`.

`python docs/generate_api.py` writes the page; with `--check` it fails where the page is not what it would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from made_page import write_or_check
from pydantic import BaseModel

import daskcnn
from daskcnn import errors

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Python

<!-- Generated from the docstrings of the package by docs/generate_api.py: edit those, not this page. -->

What `import daskcnn` gives. [python.md](python.md) shows the same by examples that run. Names that begin with an
underscore, and modules that are not listed here, may change from version to version.
"""
TITLES = ("Parameters", "Attributes", "Returns", "Raises", "Warns", "Examples")
MODULES = {
    "errors": "What a user can mend. Each error names the value, the reason and the remedy. "
    "The exit code is that of the command line.",
    "events": "A model for each event of a run: [events.md](events.md) lists them with their fields.",
}


def page() -> str:
    """The whole page."""
    names = [name for name in daskcnn.__all__ if name not in MODULES]
    parts = [HEAD.strip(), *(section(name, getattr(daskcnn, name)) for name in sorted(names, key=str.lower))]
    return "\n\n".join([*parts, errors_section(), f"## `daskcnn.events`\n\n{MODULES['events']}"]) + "\n"


def section(name: str, thing: Any) -> str:
    """A class with its methods, or a function."""
    parts = [f"## `daskcnn.{name}`"]
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return "\n\n".join([*parts, docstring(thing), "Its tables and keys: [job.md](job.md)."])
    if not (isinstance(thing, type) and issubclass(thing, BaseException)):
        parts.append(signature(f"daskcnn.{name}", thing))
    parts.append(docstring(thing))
    parts += [member(name, own, found) for own, found in members(thing)] if isinstance(thing, type) else []
    return "\n\n".join(parts)


def members(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines itself, in its order."""
    for name, found in vars(thing).items():
        if not name.startswith("_") and (inspect.isfunction(found) or isinstance(found, property | classmethod)):
            yield name, found


def member(owner: str, name: str, found: Any) -> str:
    """A method or a property."""
    head = f"### `{owner}.{name}`"
    if isinstance(found, property):
        return "\n\n".join([head, docstring(found)])
    function = found.__func__ if isinstance(found, classmethod) else found
    return "\n\n".join([head, signature(name, function), docstring(function)])


def signature(name: str, thing: Any) -> str:
    """The call, with annotations as they are written; one parameter a line where it is long."""
    parameters = [each for each in inspect.signature(thing).parameters.values() if each.name != "self"]
    words = list(_words(parameters))
    returns = "" if isinstance(thing, type) else _annotation(inspect.signature(thing).return_annotation, " -> ")
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])
    return f"```python\n{line}\n```"


def _words(parameters: list[inspect.Parameter]) -> Iterator[str]:
    named = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not named:
            named = True
            yield "*"
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        yield f"{stars}{each.name}{_annotation(each.annotation, ': ')}{_default(each.default)}"


def _default(value: Any) -> str:
    """A default; a function, which has no name to give, as an ellipsis."""
    if value is inspect.Parameter.empty:
        return ""
    return " = …" if callable(value) else f" = {value!r}"


def _annotation(annotation: Any, mark: str) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return mark + (annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def docstring(thing: Any) -> str:
    """A docstring of NumPy's kind as Markdown."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    heads = [i for i, line in enumerate(lines) if line in TITLES and lines[i + 1 : i + 2] == ["-" * len(line)]]
    parts = [_paragraphs(lines[: heads[0]] if heads else lines)]
    for begin, end in pairwise([*heads, len(lines)]):
        parts.append(_titled(lines[begin], lines[begin + 2 : end]))
    return "\n\n".join(part for part in parts if part)


def _titled(title: str, lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    if title == "Examples":
        code = re.sub(r"\s*# doctest:.*", "", inspect.cleandoc(text))
        return f"Example:\n\n```python\n{code}\n```"
    return "\n".join([f"{title}:", "", *_entries(lines)])


def _entries(lines: list[str]) -> Iterator[str]:
    """An entry a line, `name : meaning` with what is indented below it; or plain text."""
    entries: list[str] = []
    for line in lines:
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif line.strip():
            entries.append(line.strip())
    for entry in entries:
        name, colon, meaning = entry.partition(" : ")
        yield f"- `{name}`: {_code(meaning)}" if colon else f"- {_code(entry)}"


def _paragraphs(lines: list[str]) -> str:
    parts = "\n".join(lines).strip().split("\n\n")
    return "\n\n".join(_code(" ".join(part.split())) for part in parts)


def _code(text: str) -> str:
    """Code between double backquotes, as between single ones."""
    return text.replace("``", "`")


def errors_section() -> str:
    """Every error with its exit code."""
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.UserError)]
    rows = [f"| `{each.__name__}` | {_exit_code(each)} | {_one_line(each)} |" for each in found]
    table = ["| error | exit code | when |", "|---|---|---|", *rows]
    return "\n".join(["## `daskcnn.errors`", "", MODULES["errors"], "", *table])


def _exit_code(error: type[errors.UserError]) -> str:
    return "128 + signal" if error is errors.Interrupted else str(error.exit_code)


def _one_line(error: type[errors.UserError]) -> str:
    return docstring(error).partition("\n\n")[0]


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:]))
