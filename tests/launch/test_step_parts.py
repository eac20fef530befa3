"""What steps of sharded layers are made of, drawn from the runs' logs as the papers' stacked bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from daskcnn.errors import DataError, UserError
from daskcnn.events import parsed
from daskcnn.reports.plot import draw_runs
from daskcnn.show.report_tables import RunReport, tables
from daskcnn.show.run_figures import GAP, PARTS, Figure, step_parts

Record = dict[str, Any]


def row(name: str, *, busy: float, conv: float, seconds: float) -> Record:
    spent = {"busy": busy, "wait": seconds - busy, "conv_seconds": {"conv1": conv / 4, "conv2": 3 * conv / 4}}
    return {"name": name, "samples": 100, "bytes_up": 10, "bytes_down": 20, **spent}


def epoch(number: int, *rows: Record, step: int, seconds: float = 5.0) -> Record:
    return {
        "event": "epoch",
        "epoch": float(number),
        "epochs": 2,
        "step": step,
        "seconds": seconds,
        "validation": None,
        "workers": list(rows),
    }


def beginning(*names: str, home: str) -> list[Record]:
    kernels = {name: {"conv1": 4, "conv2": 8} for name in names}
    return [
        {"event": "start", "run": "elsewhere", "strategy": "layer", "epochs": 2, "samples": 100},
        {"event": "calibration", "workers": [{"name": name, "device": "cpu"} for name in names]},
        {"event": "shards", "home": home, "kernels": kernels},
    ]


FIRST = row("w0", busy=4.0, conv=3.0, seconds=5.0), row("w1", busy=2.0, conv=1.0, seconds=5.0)
SECOND = row("w0", busy=2.0, conv=1.0, seconds=5.0), row("w1", busy=4.0, conv=3.0, seconds=5.0)
TWO = [*beginning("w0", "w1", home="w0"), epoch(1, *FIRST, step=10), epoch(2, *SECOND, step=20)]
ONE = [*beginning("w0", home="w0"), epoch(1, row("w0", busy=8.0, conv=7.0, seconds=8.0), step=10, seconds=8.0)]


def bars(figure: Figure) -> dict[str, tuple[float, ...]]:
    """Communication, convolutions, the rest by what stands below the bar."""
    parts = (figure.curves[part][1] for part in PARTS)
    return dict(zip(figure.ticks, zip(*parts, strict=True), strict=True))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders of two runs."""
    monkeypatch.chdir(tmp_path)
    return [make_run(f"runs/{name}", log) for name, log in (("one", ONE), ("two", TWO))]


def log(records: list[Record]) -> RunReport:
    return tables(parsed(records))


def breakdown(report: RunReport) -> tuple[float, ...]:
    assert report.papers_step is not None
    return astuple(report.papers_step)


def draw_breakdown(runs: Sequence[str], file: str) -> Path:
    return draw_runs(runs, file, ["breakdown"])


def make_run(folder: str, records: list[Record]) -> str:
    Path(folder).mkdir(parents=True)
    Path(folder, "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in records))
    return folder


def test_the_slowest_convolutions_of_every_epoch_count_and_home_s_rest() -> None:
    assert breakdown(log(TWO)) == pytest.approx((0.1, 0.3, 0.1))


def test_every_run_has_the_papers_bar_and_one_a_worker_in_milliseconds() -> None:
    figure = step_parts({"one": log(ONE), "two": log(TWO)})
    assert figure.ticks == ["one", "w0", "two", "w0", "w1"]
    xs = figure.curves["communication"][0]
    assert xs == pytest.approx([0, 1, 2 + GAP, 3 + GAP, 4 + GAP])
    heights = [sum(figure.curves[part][1][i] for part in PARTS) for i in range(5)]
    assert heights == pytest.approx([800, 800, 500, 500, 500])
    assert bars(step_parts({"two": log(TWO)})) == {
        "two": pytest.approx((100, 300, 100)),
        "w0": pytest.approx((200, 200, 100)),
        "w1": pytest.approx((200, 200, 100)),
    }


def test_steps_that_a_resumed_run_makes_again_count_again() -> None:
    resumed = [*TWO, TWO[0], {"event": "resume", "step": 10, "path": "c"}, *TWO[1:3], TWO[-1]]
    assert breakdown(log(resumed)) == pytest.approx((0.1, 0.3, 0.1))
    assert all(sum(parts) == pytest.approx(500) for parts in bars(step_parts({"two": log(resumed)})).values())


def test_home_may_move_while_the_run_goes_on() -> None:
    moved = [*TWO[:-1], *beginning("w0", "w1", home="w1")[2:], TWO[-1]]
    rest_of_home = [4.0 - 3.0, 4.0 - 3.0]
    assert breakdown(log(moved))[2] == pytest.approx(sum(rest_of_home) / 20)


def test_the_picture_names_runs_and_workers(runs: list[str]) -> None:
    path = draw_breakdown(runs, "breakdown.svg")
    text = "".join(ElementTree.fromstring(path.read_bytes()).itertext())
    for part in (*PARTS, "one", "two", "w0", "w1", "milliseconds a step"):
        assert part in text
    with Image.open(draw_breakdown(runs[:1], "one.png")) as image:
        assert image.format == "PNG"


def test_many_bars_make_a_wider_picture(runs: list[str]) -> None:
    widths = []
    for count in (1, 8):
        folders = [make_run(f"again/{count}-{i}", TWO) for i in range(count)]
        with Image.open(draw_breakdown(folders, f"{count}.png")) as image:
            widths.append(image.width)
    assert widths[1] > 1.5 * widths[0]


def test_folders_of_the_same_name_go_by_their_paths(runs: list[str]) -> None:
    other = make_run("others/two", TWO)
    text = draw_breakdown([runs[1], other], "two.svg").read_text()
    assert "runs/two" in text
    assert "others/two" in text


def test_a_run_without_sharded_epochs_is_named(runs: list[str]) -> None:
    begun = make_run("runs/begun", TWO[:3])
    with pytest.raises(DataError, match=r"^begun: this log has no epoch of sharded layers; give a run of strategy"):
        draw_breakdown([runs[0], begun], "breakdown.svg")


def test_what_cannot_be_drawn_is_refused(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^breakdown.tiff: pictures are SVG or PNG"):
        draw_breakdown(runs, "breakdown.tiff")
    with pytest.raises(DataError, match="give a folder that may be written"):
        draw_breakdown(runs, "nowhere/breakdown.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="matplotlib is not installed; pip install"):
        draw_breakdown(runs, "breakdown.svg")
