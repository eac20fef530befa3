"""The tutorials: their blocks in order, what a run of them prints, and what the page says that it prints."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, Block, blocks

TUTORIALS = [
    ROOT / "docs/quick-start.md",
    ROOT / "docs/own-images.md",
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
]
OUTPUT = "output"
"""Marks a block of text that shows what the block before it printed."""
SKIPPED = "…"
"""A line of this alone stands for any lines; at the end of a line, for the rest of it."""
LONGEST = 280.0


@dataclass(frozen=True)
class Step:
    """A block that is run, and what the page says that it prints; none: the page does not say."""

    block: Block
    shown: Block | None


def steps(page: Path) -> Iterator[Step]:
    """The blocks that are run, in order."""
    found = blocks(page)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if "run" in block.marks:
            yield Step(block, after if after is not None and OUTPUT in after.marks else None)


def environment() -> dict[str, str]:
    """The environment of a reader whose commands are this Python's, and this checkout's package."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "110"}


class Reader:
    """A reader who gives the commands of a tutorial in one terminal. Use as a context: at its end all processes end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, folder / "printed.log"
        self._started: list[subprocess.Popen[bytes]] = []
        self._terminal = self._start(["bash", "-e"])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:  # each leads a group: what it left in the background is in it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, block: Block) -> tuple[int, str]:
        """Run a block: Python as a script, commands in the terminal. Returns its exit code and all that it printed.

        A command that fails ends the terminal, and the test with it.
        """
        self.printed.write_bytes(b"")
        if block.language == "python":
            (self.folder / "example.py").write_text(block.text, encoding="utf-8")
            code = self._start([sys.executable, "example.py"]).wait(timeout=LONGEST)
            return code, self.printed.read_text(encoding="utf-8")
        done = self.folder / "done"
        done.unlink(missing_ok=True)
        (self.folder / "block.sh").write_text(block.text, encoding="utf-8")
        assert self._terminal.stdin is not None, "a pipe"
        self._terminal.stdin.write(b". ./block.sh < /dev/null\n: > done\n")
        self._terminal.stdin.flush()
        deadline = time.monotonic() + LONGEST
        while not done.exists() and self._terminal.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{block.text}\n{self.printed.read_text(encoding='utf-8')}")
            time.sleep(0.05)
        return 0 if done.exists() else self._terminal.returncode, self.printed.read_text(encoding="utf-8")

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.printed.open("ab") as file:  # a pipe would stay open as long as what is left in the background
            where: Any = {"cwd": self.folder, "env": environment(), "start_new_session": True}
            self._started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, **where))
        return self._started[-1]


def missing_line(shown: str, printed: str) -> str | None:
    """The first line of what a page shows that was not printed in this order; None where all were.

    Numbers, columns and marks of the best differ from run to run, so they are not compared. But accuracies and traffic
    are about those of the page: it says what follows from them.
    """
    left = iter(printed.splitlines())
    for line in shown.splitlines():
        if line.strip() and line.strip() != SKIPPED and not any(_fits(line, other) for other in left):
            return line
    return None


def _fits(line: str, printed: str) -> bool:
    if line.rstrip().endswith(SKIPPED):
        return _shape(printed).startswith(_shape(line.rstrip().removesuffix(SKIPPED)))
    return _shape(line) == _shape(printed) and _is_near(line, printed)


def _is_near(line: str, printed: str) -> bool:
    """True but for accuracies that are far apart, and for traffic of more than twice as many bytes, or half.

    An accuracy near 0 or 100 % differs less from run to run than one between: by 10 points there, and by 35 at 50 %.
    """
    pairs = list(zip(_figures(line), _figures(printed), strict=True))
    if "accuracy" in line:
        shares = [(shown, found) for (shown, unit), (found, _) in pairs if unit == "%"]
        return all(abs(shown - found) < 10 + min(shown, 100 - shown) / 2 for shown, found in shares)
    if line.startswith(("traffic", "bytes")):
        return all(shown / 2 <= found <= 2 * shown for shown, found in ((a, b) for (a, _), (b, _) in pairs))
    return True


def _figures(line: str) -> list[tuple[float, str]]:
    """Its per cents and bytes."""
    found = re.findall(r"(\d[\d.,]*) (%|[kMGT]?B)(?!\w)", line)
    return [(float(figure.replace(",", "")), unit) for figure, unit in found]


def _shape(line: str) -> str:
    """The line without what differs from run to run."""
    line = re.sub(r"\d[\d.,:T-]*(e-?\d+)?", "#", line)
    line = line.replace("# min # s", "# s")  # on a slower machine
    return " ".join(re.sub(r"[*|]", " ", line).split())
