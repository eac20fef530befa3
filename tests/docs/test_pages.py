"""What the pages say is true: links and paths exist, commands parse, examples run."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from distributed.cli import dask_scheduler, dask_spec, dask_worker

from daskcnn import cli, run
from tests.command_lines import context_of
from tests.docs.pages import PAGES, ROOT, Block, anchors, blocks, commands, links, name, paths, told
from tests.docs.tutorials import TUTORIALS, environment

MADE_BY_USE = {"data/NAME.zarr", "data/shapes.zarr", "data/cifar10.zarr", "data/synthetic.zarr"}
COMMANDS = {
    ("dask", "scheduler"): dask_scheduler.main,
    ("dask", "worker"): dask_worker.main,
    ("dask", "spec"): dask_spec.main,
    ("dask", "cnn"): cli.main,
    ("python", "-m", "daskcnn.run"): run.main,
    ("daskcnn",): cli.main,
}
SHELL = ("sh", "")
RUN = "run"
STARTS_WORKERS = ("daskcnn.run", "LocalCluster")
OTHERS = [page for page in PAGES if page not in TUTORIALS]
"""The tutorials have a test of their own, which also looks at what they show as output."""
WITH_CLUSTER = [
    page for page in OTHERS if any(RUN in b.marks and start in b.text for b in blocks(page) for start in STARTS_WORKERS)
]
WITHOUT = [page for page in OTHERS if page not in WITH_CLUSTER and any(RUN in b.marks for b in blocks(page))]
EXAMPLES = [
    *(pytest.param(p, marks=[pytest.mark.cluster, pytest.mark.slow]) for p in WITH_CLUSTER),
    *(pytest.param(p) for p in WITHOUT),
]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        file, _, anchor = target.partition("#")
        goal = Path(os.path.normpath(page.parent / file)) if file else page
        assert goal.exists(), f"{name(page)}: {target}"
        if anchor and goal.exists():
            assert anchor in anchors(goal), f"{name(page)}: {target}: no such heading"


def test_no_page_has_marks_of_a_merge() -> None:
    marked = [name(page) for page in PAGES if re.search(r"^(<{7}|>{7}) ", page.read_text("utf-8"), re.MULTILINE)]
    assert not marked


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    for path in paths(page):
        found = bool(list(ROOT.glob(path))) if "*" in path else (ROOT / path).exists()
        assert found or path in MADE_BY_USE, f"{name(page)}: {path}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in seen and page.exists():
            seen.add(page)
            files = (target.partition("#")[0] for target in links(page))
            left += [Path(os.path.normpath(page.parent / file)) for file in files if file.endswith(".md")]
    assert {name(page) for page in PAGES} <= {name(page) for page in seen}


def test_the_readme_is_a_door() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


# --- commands ---


def words_of(line: str) -> list[str]:
    """The words of the command, without variables set before it, comments and what follows a pipe or `&&`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def parse(words: Sequence[str]) -> click.Context | None:
    """What click makes of a command; None for one that is not ours or Dask's."""
    for start, command in COMMANDS.items():
        if tuple(words[: len(start)]) == start:
            return context_of(command, list(words[len(start) :]))
    return None


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language in SHELL for b in blocks(p))], ids=name)
def test_commands_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language in SHELL:
            for line in commands(block):
                if line.startswith(("dask", "python -m daskcnn")):
                    assert parse(words_of(line)), f"{name(page)}, block at line {block.line}: {line}"


def test_a_wrong_command_is_seen() -> None:
    with pytest.raises(click.NoSuchOption):
        parse(shlex.split("python -m daskcnn.run --strategie sgwu"))


# --- examples ---


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", EXAMPLES, ids=name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page that are marked `run`, in order and in one folder, as a reader would run them."""
    for block in blocks(page):
        if RUN in block.marks and not (page in WITHOUT and runs_here(block, tmp_path)):
            done = execute(block, tmp_path)
            assert done.returncode == 0, f"{name(page)}, block at line {block.line}:\n{done.stdout}{done.stderr}"
            if block.language == "python":
                assert told(block) in done.stdout, f"{name(page)}, block at line {block.line}:\n{done.stdout}"


def runs_here(block: Block, folder: Path) -> bool:
    """Run a block of nothing but commands `daskcnn …` in this process, which is faster; False for any other block."""
    lines = [words_of(line) for line in commands(block)]
    if block.language not in SHELL or any(words[:1] != ["daskcnn"] for words in lines) or "<<" in block.text:
        return False
    with contextlib.chdir(folder):
        for words in lines:
            done = CliRunner().invoke(cli.main, words[1:])
            assert done.exit_code == 0, f"block at line {block.line}, {words}:\n{done.output}"
    return True


def execute(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    if block.language == "python":
        script = folder / "example.py"
        script.write_text(block.text, encoding="utf-8")
        command = [sys.executable, str(script)]
    else:
        command = ["bash", "-e", "-c", block.text]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
