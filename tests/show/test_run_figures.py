"""The figures of runs: which numbers they have, and what is left of long curves."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.show.renderers.drawing import draw, draw_confusion
from daskcnn.show.report_tables import RunReport
from daskcnn.show.run_figures import FIGURES, MOST_BARS, Figure, run_figures, thinned, top_of
from tests.show.run_events import Event, calibration, epoch, round_of, start, tables

points = st.lists(st.floats(-1e6, 1e6), max_size=200).map(lambda ys: [(float(x), y) for x, y in enumerate(ys)])


def run(*accuracies: float, workers: int = 2, **began: str) -> RunReport:
    """A run that was looked at after each of its rounds."""
    names = [f"w{i}" for i in range(workers)]
    log: list[Event] = [start(**began), calibration(*names)]
    for k, accuracy in enumerate(accuracies):
        log += [round_of(name, round=k, busy=2.0 + i, samples=100 * (i + 1)) for i, name in enumerate(names)]
        judged = {"accuracy": accuracy, "loss": 1.0 - accuracy, "auc": 0.9}
        log.append(epoch(epoch=k + 1.0, step=k + 1, validation=judged, accuracy=0.5))
    return tables([*log, {"event": "end", "status": "done", "test": {"accuracy": 0.75}}])


def figures(**reports: RunReport) -> dict[str, Figure]:
    return {figure.name: figure for figure in run_figures(reports)}


@given(points, st.integers(4, 40))
def test_a_thinned_curve_is_a_part_of_it_with_its_ends_and_its_extremes(
    curve: list[tuple[float, float]], most: int
) -> None:
    kept = list(zip(*thinned(curve, most), strict=True))
    assert len(kept) <= most
    assert [point for point in curve if point in set(kept)] == kept
    if curve:
        assert (kept[0], kept[-1]) == (curve[0], curve[-1])
        ys = [y for _, y in curve]
        assert {min(ys), max(ys)} <= {y for _, y in kept}
    if len(curve) <= most:
        assert kept == curve


def test_accuracy_goes_by_time_by_epoch_and_by_the_bytes_moved_until_then() -> None:
    found = figures(mine=run(0.2, 0.4))
    by_time, by_epoch, by_bytes = (found[f"accuracy-by-{x}"].curves for x in ("time", "epoch", "bytes"))
    assert by_epoch == {"training": ([1, 2], [50, 50]), "validation": ([1, 2], pytest.approx([20, 40]))}
    assert by_time["validation"][0] == [20, 40]
    assert by_bytes["validation"][0] == pytest.approx([0.006, 0.012])
    assert found["accuracy-by-time"].levels == {"test": 75}
    assert found["loss-by-epoch"].curves["validation"][1] == pytest.approx([0.8, 0.6])
    assert found["auc-by-epoch"].curves == {"validation": ([1, 2], [0.9, 0.9])}


def test_first_losses_that_would_flatten_the_others_are_left_above_the_figure() -> None:
    def top(*losses: list[float]) -> float | None:
        return top_of([(range(len(ys)), ys) for ys in losses])

    assert top([7.0, 0.9, 0.5], [2.0, 1.0, 0.8]) == pytest.approx(1.05)
    assert top([2.0, 1.5, 1.2], [1.9, 1.6, 1.4]) is None
    for losses in [7.0], [7.0, 0.0, 0.0], [7.0, math.nan, 0.0], [math.inf, math.inf]:
        assert top(losses) is None


def test_bars_are_the_figures_of_the_table_of_workers() -> None:
    report = run(0.2, 0.4)
    found = figures(mine=report)
    time, samples = found["time-by-worker"], found["samples-by-worker"]
    assert time.ticks == samples.ticks == ["w0", "w1"]
    assert samples.curves["samples"][1] == [200, 400] == [worker.samples for worker in report.workers]
    for part in ("compute", "evaluation", "communication", "wait"):
        assert time.curves[part][1] == pytest.approx([getattr(worker, part) for worker in report.workers])
    assert "load" in time.curves or not any(worker.load for worker in report.workers)


def test_balance_and_wait_are_those_of_every_round() -> None:
    report = run(0.2, 0.4)
    found = figures(mine=report)
    assert found["balance-by-round"].curves == {"balance": ([1, 2], [each.balance for each in report.by_round])}
    assert found["wait-by-round"].curves["by Eq. 8"][1] == [each.wait for each in report.by_round]
    alone = figures(mine=run(0.2, workers=1))
    assert not {"balance-by-round", "wait-by-round"} & alone.keys()


def test_of_several_runs_each_has_a_curve_and_bars_apart_from_the_others() -> None:
    found = figures(a=run(0.2, 0.4), b=run(0.3))
    assert list(found["accuracy-by-epoch"].curves) == ["a", "b"]
    assert found["accuracy-by-epoch"].levels == {}
    assert found["time-by-worker"].ticks == ["a w0", "a w1", "b w0", "b w1"]
    first, second, third, _ = found["time-by-worker"].curves["compute"][0]
    assert third - second > second - first == 1
    assert set(found["wait-by-round"].curves) == {"a", "b"}


def test_of_several_runs_it_is_said_that_they_are_compared_on_validation_samples() -> None:
    one, several = figures(a=run(0.2)), figures(a=run(0.2), b=run(0.3))
    assert [one[name].y for name in ("accuracy-by-time", "loss-by-epoch")] == ["accuracy, %", "loss"]
    for name in ("accuracy-by-time", "accuracy-by-epoch", "loss-by-time", "loss-by-epoch"):
        assert several[name].title.startswith("Validation ")
        assert several[name].y.startswith("validation ")
    assert one["auc-by-epoch"].y == several["auc-by-epoch"].y == "validation AUC"


def test_a_picture_names_the_unit_of_its_levels_and_counts_in_whole_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = figures(mine=run(0.2, 0.4))
    drawn = draw(found["accuracy-by-epoch"], tmp_path / "a.svg").read_text()
    assert ">test: 75 %<" in drawn
    assert not {">0.5<", ">0.25<", ">1.5<"} & set(re.findall(">[^<>]+<", drawn)), "no epoch is a part of one"
    short = replace(found["accuracy-by-epoch"], curves={"validation": ([0.25, 0.75], [10.0, 20.0])})
    assert ">0.6<" in draw(short, tmp_path / "b.svg").read_text(), "a run of less than an epoch has parts of one"


def test_a_confusion_matrix_shows_its_zeros(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw_confusion(["a", "b"], [[5, 0], [0, 7]], tmp_path / "a.svg", title="t").read_text()
    assert drawn.count(">0<") == 2


def test_of_very_many_workers_some_have_a_bar() -> None:
    bars = figures(mine=run(0.2, workers=3 * MOST_BARS))["time-by-worker"]
    assert len(bars.ticks) == MOST_BARS
    assert bars.x == "worker (some of many)"


def test_a_run_that_has_just_begun_has_no_figures_and_every_figure_has_a_known_name() -> None:
    assert run_figures({"mine": tables([start()])}) == ()
    names = [figure.name for figure in run_figures({"mine": run(0.2)})]
    assert names == [name for name in FIGURES if name in names]


def test_names_from_outside_are_made_harmless() -> None:
    report = tables([start(), calibration("\x1b[2Jw"), round_of("\x1b[2Jw")])
    assert figures(mine=report)["time-by-worker"].ticks == ["\\x1b[2Jw"]
