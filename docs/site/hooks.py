"""What MkDocs does beside its plugins when it builds the site. `mkdocs.yml` names this file.

The pages are written for GitHub as well. So links may lead out of `docs/`: what they lead to becomes part of the site,
under `repository/`. Anchors are GitHub's. Formulas between dollars become MathML, which browsers show without a script
or a font from elsewhere.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
OUTSIDE = "repository/"
"""Where files from outside `docs/` lie in the site."""
FENCED = re.compile(r"(?ms)^```[^\n`]*\n.*?^```$")
LINK = re.compile(r"(?P<text>!?\[(?:[^\]\[]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
MARKS = re.compile(r"(?m)^```(\w+) [\w ]+$")
NOT_RUN = re.compile(r"(?m)^<!-- not run: (.*?) -->$")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
FROM_ELSEWHERE = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*\bhref="(?:https?:)?//'
)
CANONICAL = re.compile(r'<link rel="canonical"[^>]*>')


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add every file of the repository that a page links to, and what those pages link to."""
    left = [file.src_uri for file in files.documentation_pages()]
    seen = {file.src_uri for file in files}
    while left:
        page = left.pop()
        for uri in map(site_uri, linked(page)):
            if uri.startswith(OUTSIDE) and uri not in seen and repository_path(uri).is_file():
                seen.add(uri)
                files.append(File.generated(config, uri, abs_src_path=str(repository_path(uri))))
                left += [uri] if uri.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the site; fences without the words that tests go by."""
    own = page.file.src_uri
    markdown = outside_fences(markdown, lambda text: LINK.sub(lambda found: in_site(found, own), text))
    markdown = NOT_RUN.sub(r'<p class="not-run">Not run by the tests: \1.</p>\n', markdown)
    return MARKS.sub(r"```\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(lambda found: formula(found[2], block=found[1] == "div"), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would ask another host for a script, a style or a picture."""
    if found := FROM_ELSEWHERE.search(CANONICAL.sub("", output)):
        raise PluginError(f"{page.file.src_uri}: asks another host: {found.group()}")
    return output


def formula(latex: str, *, block: bool) -> str:
    """MathML of a formula; its own text stays with it, for those who copy it."""
    text = html.unescape(latex).strip()
    made: str = convert(text, display="block" if block else "inline")
    return made.replace("<math ", f'<math title="{html.escape(text, quote=True)}" ', 1)


def outside_fences(markdown: str, change: Any) -> str:
    """The page with everything but its fenced blocks changed."""
    kept = [found.group() for found in FENCED.finditer(markdown)]
    parts = [change(part) for part in FENCED.split(markdown)]
    return "".join(a + b for a, b in zip(parts, [*kept, ""], strict=True))


def in_site(found: re.Match[str], own: str) -> str:
    """A link as it is in the site; of one to a folder the text alone."""
    target = found["target"]
    if leads_away(target):
        return found.group()
    file, mark, anchor = target.partition("#")
    goal = goal_of(own, file)
    if (ROOT / goal).is_dir():
        if not (ROOT / goal / "README.md").exists():
            return found["text"][1:-1]
        goal = posixpath.join(goal, "README.md")
    return f"{found['text']}({posixpath.relpath(site_uri(goal), posixpath.dirname(own) or '.')}{mark}{anchor})"


def linked(own: str) -> Iterator[str]:
    """The files of the repository that a page of the site links to."""
    text = FENCED.sub("", repository_path(own).read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        if not leads_away(found["target"]):
            goal = goal_of(own, found["target"].partition("#")[0])
            yield posixpath.join(goal, "README.md") if (ROOT / goal).is_dir() else goal


def leads_away(target: str) -> bool:
    """Whether a link leads to another site, or to a place on its own page."""
    return target.startswith("#") or re.match(r"[a-z]+:", target) is not None


def goal_of(own: str, file: str) -> str:
    """The path in the repository that a link of a page of the site leads to."""
    return os.path.normpath(repository_path(own).parent / file).removeprefix(f"{ROOT}{os.sep}").replace(os.sep, "/")


def site_uri(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def repository_path(uri: str) -> Path:
    """The file of the repository that lies there in the site."""
    return ROOT / uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else ROOT / "docs" / uri
