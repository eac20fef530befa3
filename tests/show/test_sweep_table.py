"""Runs of a sweep by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from daskcnn.cli import main as daskcnn
from daskcnn.events import EpochEnded, Event, Judged, RunEnded, RunStarted
from daskcnn.reports.report import sweep_runs
from daskcnn.show.report_tables import tables
from daskcnn.show.sweep_table import format_sweep, sweep_figure, sweep_table

ACCURACIES = {("bsp", 0): 0.5, ("bsp", 1): 0.6, ("sgwu", 0): 0.7, ("sgwu", 1): 0.7}


def events(strategy: str, seed: int, accuracy: float | None, *, done: bool = True) -> list[Event]:
    judged = Judged(loss=1.0, accuracy=accuracy)
    found: list[Event] = [RunStarted(run=f"lab-{strategy}-seed{seed}", strategy=strategy, seed=seed, at=0.0)]
    found += [EpochEnded(epoch=float(i), step=i, loss=1.0, validation=judged, at=10.0 * i) for i in (1, 2)]
    return [*found, RunEnded(status="done", test=judged, at=20.0 + 2 * seed)] if done else found


def method(strategy: str, seed: int) -> dict[str, Any]:
    return {"train": {"strategy": strategy, "seed": seed}}


def test_cells_are_runs_that_differ_in_their_seeds_alone() -> None:
    reports = [tables(events(*key, accuracy)) for key, accuracy in ACCURACIES.items()]
    found = sweep_table(reports, [method(*key) for key in ACCURACIES])
    assert found.keys == ("train.strategy",)
    assert [cell.values for cell in found.cells] == [{"train.strategy": "bsp"}, {"train.strategy": "sgwu"}]
    spread = found.cells[0].figures["test accuracy"]
    assert (spread.mean, spread.deviation, spread.runs) == pytest.approx((0.55, 0.0707, 2), abs=1e-4)
    assert found.best == 1
    lines = format_sweep(found).splitlines()
    assert lines[0].split()[:2] == ["train.strategy", "runs"]
    assert "55.0 ± 7.1 %" in lines[1]
    assert "70.0 ± 0.0 %" in lines[2]
    assert "2*" in lines[2]


def test_runs_that_did_not_end_well_are_counted_and_not_in_the_means() -> None:
    reports = [tables(events("bsp", 0, 0.5)), tables(events("bsp", 1, 0.9, done=False))]
    found = sweep_table(reports, [method("bsp", 0), method("bsp", 1)])
    (cell,) = found.cells
    assert (cell.done, len(cell.runs)) == (1, 2)
    assert cell.figures["test accuracy"].mean == 0.5
    assert "1/2" in format_sweep(found)
    assert found.best is None


def test_the_figure_has_the_mean_of_each_cell() -> None:
    reports = [tables(events(*key, accuracy)) for key, accuracy in ACCURACIES.items()]
    figure = sweep_figure(reports, sweep_table(reports, [method(*key) for key in ACCURACIES]))
    epochs, accuracies = figure.curves["strategy=bsp"]
    assert [*epochs] == [1.0, 2.0]
    assert [*accuracies] == pytest.approx([55.0, 55.0])


def at_epochs(strategy: str, seed: int, looks: dict[float, float], *, done: bool = True) -> list[Event]:
    found: list[Event] = [RunStarted(run=f"lab-{strategy}-seed{seed}", strategy=strategy, seed=seed, at=0.0)]
    for step, (epoch, accuracy) in enumerate(looks.items(), 1):
        found.append(EpochEnded(epoch=epoch, step=step, validation=Judged(accuracy=accuracy), at=10.0 * epoch))
    return [*found, RunEnded(status="done", at=30.0)] if done else found


def test_the_figure_interpolates_runs_that_were_judged_at_other_epochs() -> None:
    """An asynchronous rule judges at uneven epochs."""
    runs = [{1.01: 0.5, 2.03: 0.6, 3.0: 0.7}, {0.97: 0.5, 1.98: 0.6, 3.0: 0.9}]
    reports = [tables(at_epochs("agwu", seed, looks)) for seed, looks in enumerate(runs)]
    ((epochs, accuracies),) = sweep_figure(reports, sweep_table(reports, [method("agwu", 0)] * 2)).curves.values()
    assert [*epochs] == [1.01, 1.98, 2.03, 3.0]
    assert accuracies[-1] == pytest.approx(80.0)
    assert [*accuracies] == sorted(accuracies)


def test_the_figure_has_the_runs_that_the_table_has() -> None:
    """One that broke off, or that a search ended early, takes nothing from a cell; a cell of such runs says so."""
    looks = {1.0: 0.5, 2.0: 0.6}
    runs = [("bsp", looks, True), ("bsp", {1.0: 0.1}, False), ("bsp", {}, False), ("agwu", looks, False)]
    reports = [tables(at_epochs(rule, i, own, done=done)) for i, (rule, own, done) in enumerate(runs)]
    table = sweep_table(reports, [method(rule, i) for i, (rule, *_) in enumerate(runs)])
    curves = sweep_figure(reports, table).curves
    assert [*curves] == ["strategy=bsp", "strategy=agwu (none ended well)"]
    assert all(([*epochs], [*shown]) == ([1.0, 2.0], [50.0, 60.0]) for epochs, shown in curves.values())


def written(folder: Path) -> None:
    for (strategy, seed), accuracy in ACCURACIES.items():
        run = folder / f"lab-{strategy}-seed{seed}"
        run.mkdir(parents=True)
        (run / "job.json").write_text(json.dumps(method(strategy, seed)))
        lines = [json.dumps(event.record()) for event in events(strategy, seed, accuracy)]
        (run / "events.jsonl").write_text("\n".join(lines) + "\n")


def test_a_sweep_is_a_folder_of_runs_or_what_their_names_begin_with(tmp_path: Path) -> None:
    written(tmp_path / "runs")
    (tmp_path / "runs" / "other").mkdir()
    runs = sorted(str(tmp_path / "runs" / f"lab-{strategy}-seed{seed}") for strategy, seed in ACCURACIES)
    assert sweep_runs(str(tmp_path / "runs" / "lab")) == sweep_runs(str(tmp_path / "runs")) == runs
    assert sweep_runs(runs[0]) == sweep_runs(str(tmp_path / "none")) == []


def test_compare_prints_and_draws_a_sweep(tmp_path: Path) -> None:
    written(tmp_path)
    picture = tmp_path / "sweep.svg"
    result = CliRunner().invoke(daskcnn, ["compare", str(tmp_path / "lab"), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "70.0 ± 0.0 %" in result.output
    assert "strategy=bsp" in picture.read_text()
    page, beside = tmp_path / "sweep.html", tmp_path / "beside.svg"
    both = ["compare", str(tmp_path / "lab"), "--html", str(page), "--picture", str(beside)]
    assert CliRunner().invoke(daskcnn, both).output.splitlines() == [f"page {page}", f"picture {beside}"]
    assert page.is_file()
    assert beside.read_bytes() == picture.read_bytes()
    plain = json.loads(CliRunner().invoke(daskcnn, ["compare", str(tmp_path / "lab"), "--json"]).output)
    assert plain["cells"][1]["values"] == {"train.strategy": "sgwu"}
    runs = [str(tmp_path / f"lab-{strategy}-seed0") for strategy in ("bsp", "sgwu")]
    assert "is of a sweep" in CliRunner().invoke(daskcnn, ["compare", *runs, "--picture", "x.svg"]).output


def test_runs_of_a_sweep_that_cannot_be_read_are_left_out_with_a_warning(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "lab-bsp-seed0" / "events.jsonl").write_text("")
    (tmp_path / "lab-bsp-seed1" / "events.jsonl").write_text("{\n{\n")
    found = CliRunner().invoke(daskcnn, ["compare", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert "70.0 ± 0.0 %" in found.stdout
    empty, damaged = found.stderr.splitlines()
    assert empty.startswith(f"warning: left out: {tmp_path / 'lab-bsp-seed0' / 'events.jsonl'}: no events; ")
    assert "lab-bsp-seed1" in damaged
    for run in sweep_runs(str(tmp_path)):
        (Path(run) / "events.jsonl").write_text("")
    assert CliRunner().invoke(daskcnn, ["compare", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize(("name", "reason"), [("none", "nothing is there"), ("", "it has no job.json")])
def test_a_place_without_runs_is_named(tmp_path: Path, name: str, reason: str) -> None:
    refused = CliRunner().invoke(daskcnn, ["compare", str(tmp_path / name)])
    assert refused.exit_code == 2
    assert f"{tmp_path / name}: not a run directory ({reason})" in refused.stderr
