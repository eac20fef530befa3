"""What people see of a run, to the letter: on terminals of three widths, without colour, and in the log of a CI."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from daskcnn.events import parse
from daskcnn.show.renderers.terminal import PlainProgress, TerminalProgress, choose
from tests.show.run_events import asynchronous, data_parallel, layer_sharded, start

SNAPSHOTS = Path(__file__).with_name("snapshots")
CALIBRATING: list[dict[str, Any]] = [
    start(),
    {
        "event": "calibrating",
        "worker": "desk-1",
        "doing": "a convolution 5x5 of 32 to 32 channels, maps 16x16",
        "done": 1,
        "of": 3,
    },
    {
        "event": "calibrating",
        "worker": "desk-2",
        "doing": "compiling loops for this machine",
        "done": 20,
        "of": 97,
    },
]
RUNS = {
    "calibrating": CALIBRATING,
    "sgwu": data_parallel(),
    "agwu": asynchronous(),
    "layer": layer_sharded(),
}


def frames(width: int) -> str:
    """The last frame of each run on a terminal of this width."""
    shown = []
    for events in RUNS.values():
        now = [0.0]
        console = Console(record=True, force_terminal=True, width=width, height=30, file=io.StringIO(), highlight=False)
        progress = TerminalProgress(console, now=lambda now=now: now[0])  # type: ignore[misc]
        for event in events:
            now[0] += 10.0
            progress.handle(parse(event))
        console.export_text()
        console.print(progress.render())
        shown.append(console.export_text())
    return "".join(shown)


def expect(name: str, text: str) -> None:
    """Compare with the snapshot. One that is missing is written, and fails: look at it before it is committed."""
    file = SNAPSHOTS / f"{name}.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        pytest.fail(f"{file} was missing; look at what is written there now")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal(width: int) -> None:
    expect(f"terminal-{width}", frames(width))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_frame_fits_its_terminal(width: int) -> None:
    assert {len(line) for line in frames(width).splitlines()} == {width}


def test_a_terminal_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told by colour alone."""
    monkeypatch.setenv("NO_COLOR", "1")
    expect("terminal-120-no-color", frames(120))


def test_no_colour_is_written_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    console = Console(force_terminal=True, width=120, file=file, highlight=False)
    progress = TerminalProgress(console, now=lambda: 0.0)
    for event in data_parallel():
        progress.handle(parse(event))
    console.print(progress.render())
    codes = {code for part in file.getvalue().split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
    assert codes <= {"0", "1", "2"}, "bold and dim are no colours"


def test_the_log_of_a_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, whatever the CI says of terminals and colours."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    assert isinstance(choose(stream, False), PlainProgress)
    with PlainProgress(stream, now=lambda: datetime(2026, 11, 20, 20, 15, 3)) as progress:
        for event in [*CALIBRATING, *asynchronous()[1:], {"event": "end", "status": "done"}]:
            progress.handle(parse(event))
    expect("ci-log", stream.getvalue())
