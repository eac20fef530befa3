"""Runs side by side, and reports in words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daskcnn.documents import jsonable
from daskcnn.show.comparison import ComparedLine, Comparison, compare, format_comparison, told_apart
from daskcnn.show.renderers.run_text import MOST, format_report
from daskcnn.show.report_tables import RunReport
from tests.show.run_events import (
    Event,
    asynchronous,
    calibration,
    data_parallel,
    epoch,
    layer_sharded,
    round_of,
    start,
    tables,
)


def run(
    name: str, *accuracies: float, seconds: float = 10.0, status: str = "done", test: float | None = None, **began: Any
) -> RunReport:
    """A run of one worker that was looked at after each of its rounds, `seconds` apart."""
    events: list[Event] = [start(run=f"runs/{name}", **began), calibration("w0")]
    for k, accuracy in enumerate(accuracies):
        validation = {"accuracy": accuracy, "loss": 1.0}
        events += [round_of("w0", round=k, epoch=k + 1.0), epoch(epoch=k + 1.0, seconds=seconds, validation=validation)]
    judged = None if test is None else {"accuracy": test, "loss": 0.5}
    return tables([*events, {"event": "end", "status": status, "test": judged}])


def line(comparison: Comparison, label: str) -> ComparedLine:
    (found,) = (line for line in comparison.lines if line.label == label)
    return found


# --- figures ---


def test_time_epochs_and_rounds_to_an_accuracy_are_those_of_the_first_look_that_has_it() -> None:
    result = compare([run("a", 0.4, 0.7, 0.6), run("b", 0.6, 0.6, 0.6, seconds=30.0)], targets=[0.6, 0.65, 0.9])
    assert line(result, "time to 60 %").values == (20.0, 30.0)
    assert line(result, "rounds to 60 %").values == (2, 1)
    assert line(result, "epochs to 65 %").values == (2.0, None)
    assert line(result, "time to 90 %").values == (None, None)


def test_the_best_of_a_line_is_the_least_or_the_most_and_nobody_where_all_are_alike() -> None:
    result = compare([run("a", 0.4, test=0.5), run("b", 0.7, test=0.5), run("c", 0.7, seconds=9.0)], targets=[0.6])
    assert line(result, "last validation accuracy").best == (1, 2)
    assert line(result, "time").best == (2,)
    assert line(result, "test accuracy").best == ()
    assert line(result, "wait").best == ()
    assert line(result, "strategy").best == ()


def test_who_reaches_a_target_that_others_miss_is_the_best() -> None:
    result = compare([run("a", 0.4), run("b", 0.7)], targets=[0.6])
    assert line(result, "time to 60 %").best == (1,)


def test_targets_that_nobody_asked_for_and_nobody_reached_are_left_out() -> None:
    result = compare([run("a", 0.4), run("b", 0.7)], targets=[0.6, 0.9], reached=True)
    told = [line.label for line in result.lines if line.label.startswith("time to")]
    assert told == ["time to 60 %"]


def test_of_runs_on_other_data_none_is_the_best_in_accuracy() -> None:
    result = compare([run("a", 0.4, test=0.5), run("b", 0.7, test=0.6, seconds=9.0, dataset="other")], targets=[0.3])
    for label in ("last validation accuracy", "test accuracy", "time to 30 %"):
        assert line(result, label).best == ()
    assert line(result, "time").best == (1,)


def test_a_run_that_broke_off_is_not_the_fastest() -> None:
    broken = run("a", 0.1, seconds=1.0, status="diverged")
    assert line(compare([broken, run("b", 0.7), run("c", 0.7, seconds=20.0)]), "time").best == (1,)
    assert line(compare([broken, run("b", 0.7, status="lost")]), "time").best == (0,)


def test_runs_that_are_hard_to_compare_are_said_to_be() -> None:
    assert compare([run("a", 0.5), run("b", 0.5, strategy="agwu")]).differences == ()
    for change, words in (
        ({"samples": 100}, "data differ"),
        ({"dataset": "mnist"}, "data differ"),
        ({"parameters": 5}, "networks differ"),
        ({"epochs": 3}, "epochs differ"),
    ):
        (told,) = compare([run("a", 0.5), run("b", 0.5, **change)]).differences
        assert words in told


def calibrated(name: str, images_per_second: float = 100.0, **worker: Any) -> RunReport:
    """A run of one worker that measured this of itself."""
    row = {"name": "w0", "host": "desk-1", "processor": "Ryzen", "threads": 4, "images_per_second": images_per_second}
    return tables([start(run=f"runs/{name}"), {"event": "calibration", "workers": [row | worker]}, round_of("w0")])


def test_runs_under_another_load_are_said_to_be() -> None:
    (told,) = compare([calibrated("idle"), calibrated("busy", 60.0)]).differences
    assert "the load differs" in told
    assert "the workers of runs/busy were 40.0 % slower than those of runs/idle" in told
    assert f"warning: {told}" in format_comparison(compare([calibrated("idle"), calibrated("busy", 60.0)]))
    assert compare([calibrated("a"), calibrated("b", 90.0)]).differences == (), "measurements scatter"


@pytest.mark.parametrize("change", [{"processor": "Xeon"}, {"host": "desk-2"}, {"threads": 8}])
def test_runs_on_other_machines_are_said_to_be(change: dict[str, Any]) -> None:
    (told,) = compare([calibrated("a"), calibrated("b", 10.0, **change)]).differences
    assert "the machines differ" in told


@pytest.mark.parametrize("events", [[], [start()], data_parallel(), asynchronous(), layer_sharded()])
def test_any_two_runs_can_be_compared(events: list[Event]) -> None:
    result = compare([tables(events), run("b", 0.5)], targets=[0.5])
    assert all(len(line.values) == len(line.shown) == 2 for line in result.lines)
    plain = jsonable(result.to_dict())
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert format_comparison(result)


def test_workers_that_were_left_out_are_not_counted() -> None:
    begun, trained = [start(), calibration("w0", "w1")], [round_of("w0"), epoch()]
    left_out = {"event": "worker-left-out", "worker": "w1", "reason": "it costs more than it brings"}
    alone = tables([start(), calibration("w0"), *trained])
    result = compare([tables([*begun, left_out, *trained]), alone, tables(begun)])
    assert line(result, "workers").values == ("1 cpu", "1 cpu", "2 cpu")
    assert not compare([tables([*begun, left_out, *trained]), alone]).differences, "nor are they other machines"


def test_a_simulation_is_called_one() -> None:
    assert line(compare([run("a", 0.5, simulated=True), run("b", 0.5)]), "status").shown == (
        "done, a simulation",
        "done",
    )


# --- in words ---


def test_runs_stand_under_their_names_and_the_best_is_marked() -> None:
    text = format_comparison(compare([run("slow", 0.4, 0.7), run("fast", 0.7)], targets=[0.6, 0.9]))
    lines = text.splitlines()
    assert lines[0].split() == ["slow", "fast"]
    assert re.search(r"^time to 60 % +20\.0 s +10\.0 s\*$", text, re.M)
    assert re.search(r"^time to 90 % +- +-$", text, re.M)
    assert "test accuracy" not in text
    assert {len(row.rstrip("* ")) for row in lines[:4]} == {len(lines[0])}


def test_long_or_equal_names_are_listed_and_numbered() -> None:
    for name, other in (("a" * 30, "b"), ("same", "same")):
        lines = format_comparison(compare([run(name, 0.4), run(other, 0.5)])).splitlines()
        assert lines[0] == f"1  runs/{name}"
        assert lines[3].split() == ["1", "2"]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (("x/same", "y/same"), ("x/same", "y/same")),
        (("x/a/same", "y/a/same", "y/b"), ("x/a/same", "y/a/same", "runs/y/b")),
        (("2026-11-26-112042-sgwu", "2026-11-26-112142-sgwu"), ("…112042-sgwu", "…112142-sgwu")),
        (("a", "b"), ("a", "b")),
    ],
)
def test_names_are_the_shortest_that_tell_runs_apart(names: tuple[str, ...], short: tuple[str, ...]) -> None:
    comparison = compare([run(name, 0.4) for name in names])
    assert comparison.names == short
    assert format_comparison(comparison).splitlines()[0].split() == list(short)


@given(st.lists(st.text("ab-/", min_size=1, max_size=40), min_size=2, max_size=5, unique=True))
@example(["/", "//"])
@settings(max_examples=60, deadline=None)
def test_names_of_paths_that_differ_differ(paths: list[str]) -> None:
    apart = {path.rstrip("/") for path in paths}
    assert len({*told_apart(paths)}) == len(apart)


# --- keys of the jobs ---


def test_the_keys_in_which_jobs_differ_come_first() -> None:
    def method(**keys: Any) -> dict[str, Any]:
        conv = {"layer": "conv", "kernels": keys.pop("kernels", 8)}
        return {
            "model": {"name": None, "layers": [conv, {"layer": "relu"}]},
            "train": {"lr": 0.1, "momentum": 0.9} | keys,
        }

    runs = [run("a", 0.5), run("b", 0.7), run("log", 0.6)]
    result = compare(runs, methods=[method(), method(lr=0.01), {}])
    (lr,) = result.keys
    assert (lr.label, lr.values, lr.shown) == ("train.lr", (0.1, 0.01, None), ("0.1", "0.01", "-"))
    assert result.told()[0] is lr
    assert result.labels() == ("a (lr=0.1)", "b (lr=0.01)", "log (lr=-)")
    assert re.search(r"^train.lr +0.1 +0.01 +-$", format_comparison(result), re.M)
    dated = compare([run(f"2026-11-26-11204{i}-sgwu", 0.5) for i in range(2)], methods=[method(), method(lr=0.01)])
    assert dated.labels() == ("lr=0.1", "lr=0.01")
    several = compare(runs, methods=[method(), method(kernels=16, momentum=None), method(nesterov=True)])
    found = {line.label: line.values for line in several.keys}
    assert found == {"model.layers[0].kernels": (8, 16, 8), "train.momentum": (0.9, None, 0.9)}
    assert several.labels() == several.names
    assert not compare(runs, methods=[method(), method(), method()]).keys


def test_keys_of_other_kinds_are_told_in_short() -> None:
    one = {
        "model": {"name": "lenet5", "layers": None},
        "data": {"path": f"/home/{'ann/' * 9}a.zarr", "views": {"crop": 2}},
    }
    two = {"model": {"name": None, "layers": [{}, {}]}, "data": {"path": f"/home/{'ann/' * 9}b.zarr", "views": "none"}}
    shown = {line.label: line.shown for line in compare([run("a"), run("b")], methods=[one, two]).keys}
    assert shown.pop("data.views") == ('{"crop": 2}', "none")
    assert shown == {
        "model.name": ("lenet5", "-"),
        "model.layers": ("-", "2 entries"),
        "data.path": ("a.zarr", "b.zarr"),
    }


def test_people_see_every_table_of_a_run() -> None:
    events = asynchronous()
    events.insert(4, {"event": "server", "server": 1, "merged": 3, "repeated": 0, "refused": {"finite": 2}})
    text = format_report(tables(events))
    for words in (
        "agwu, 3.4 of 10 epochs",
        "89,578 parameters, on 48,000 samples",
        "w2 (lost)",
        "mean staleness",
        "by Eq. 8",
        "by Eq. 11: 2.1 MB (2 x 358.3 kB x 3 pushes), measured 0.004 of it",
        "3 pushes merged, 0 repeated, 2 events refused (finite 2)",
        "validation accuracy",
        "8,000 samples moved to the others",
    ):
        assert words in text
    assert "\nrounds\n" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_run_without_rounds_says_so_instead_of_showing_empty_tables() -> None:
    text = format_report(tables([start(), calibration("w0"), {"event": "end", "status": "diverged"}]))
    assert "no round has ended yet" in text
    assert "diverged" in text
    assert "workers\n" not in text
    assert format_report(tables([]))


def test_every_round_is_shown_where_it_is_asked_for_with_its_life_if_there_were_two() -> None:
    events = [start(), calibration("w0"), round_of("w0", round=0, q=0.25), round_of("w0", round=1, base_version=7)]
    text = format_report(tables(events), full=True)
    rounds = text[text.index("\nrounds\n") :].splitlines()
    assert len(rounds) == 5
    assert "life" not in rounds[2]
    assert "0.250" in rounds[3]
    again = format_report(tables([*events, events[-1]]), full=True)
    assert re.search(r"worker +life +round", again)


def test_long_tables_are_thinned_to_the_first_the_last_and_some_between() -> None:
    names = [f"w{i:03d}" for i in range(200)]
    events = [start(), calibration(*names), *(round_of(name, round=0) for name in names)]
    short, full = format_report(tables(events)), format_report(tables(events), full=True)
    assert f"({MOST} of 201; --rounds shows all)" in short
    workers = short[: short.index("\npushes\n")]
    shown = re.findall(r"^  (w\d+|all) ", workers, re.M)
    assert len(shown) == MOST
    assert (shown[0], shown[-1]) == ("w000", "all")
    assert all(f"  {name} " in full for name in names)


def test_what_a_log_says_cannot_drive_the_terminal() -> None:
    evil = "\x1b[2Jevil\n"
    events = [start(run=evil, strategy=evil, model=evil, dataset=evil, rule={evil: evil}), calibration(evil)]
    events += [
        round_of(evil, round=0),
        epoch(),
        {"event": "warning", "message": evil},
        {"event": "end", "status": evil},
    ]
    report = tables(events)
    for text in (format_report(report, full=True), format_comparison(compare([report, report]))):
        assert all(c.isprintable() or c == "\n" for c in text)


def test_the_jobs_own_metrics_have_lines_and_columns_of_their_own() -> None:
    judged = {"accuracy": 0.5, "loss": 1.0, "metrics": {"top3": 0.75, "odd": None}}
    log = [start(run="a"), calibration("w0"), round_of("w0"), epoch(validation=judged)]
    one = tables([*log, {"event": "end", "status": "done", "test": judged}])
    result = compare([one, run("b", 0.4, test=0.5)])
    assert line(result, "test top3").values == (0.75, None)
    assert line(result, "validation top3").shown == ("0.75", "-")
    assert line(result, "validation top3").best == ()
    text = format_report(one)
    assert "accuracy 50.0 %, loss 1.000, top3 0.75, odd -" in text
    assert re.search(r"validation accuracy +top3\n.* 50\.0 % +0\.75", text)
