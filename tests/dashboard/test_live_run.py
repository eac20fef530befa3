"""A run folded from its events as they come: nothing twice, nothing lost, within bounds, like the report."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.dashboard import live_run
from daskcnn.dashboard.live_run import (
    MOST_LINES,
    MOST_PARTS,
    MOST_ROUNDS,
    MOST_RUNS,
    LiveRun,
    Message,
    Runs,
    ShownBar,
    heading,
    shown,
)
from daskcnn.show.history import SPENT
from daskcnn.show.text import count
from tests.show import run_events
from tests.show.run_events import Event

LAYERS = (("conv1", "Conv(kernels=26)", "32×32×26", 100), ("relu1", "ReLU()", "32×32×26", 0))


def timed(log: list[Event], every: float = 1.0) -> list[Event]:
    return [{"at": 1000.0 + i * every, **event} for i, event in enumerate(log)]


def rounds(many: int, *workers: str, **changes: Any) -> list[Event]:
    """A run's rounds, a look after each."""
    log = [run_events.start(increments=1, batch_size=50), run_events.calibration(*workers)]
    for i in range(many):
        epoch = (i + 1) / 10
        spent = {"busy": 0.5, "load": 0.1, "wait": 0.2, "communication": 0.1, "evaluation": 0.1}
        log += [run_events.round_of(name, round=i, epoch=epoch, samples=100, **spent | changes) for name in workers]
        log.append(run_events.epoch(epoch=epoch, step=i + 1))
    return timed(log, 1 / (len(workers) + 1))


def heard(log: list[Event], *, layers: Any = LAYERS) -> LiveRun:
    run = LiveRun("here:/runs/it")
    run.hear(Message(run.key, "a", 0, log, layers), 5.0)
    return run


LOGS = {
    "sgwu": rounds(4, "w0", "w1"),
    "agwu": timed(run_events.asynchronous()),
    "layer": timed([*run_events.layer_sharded(), {"event": "shards", "home": "w0", "kernels": {}}]),
}


@given(st.sampled_from(sorted(LOGS)), st.data())
def test_whatever_the_batches_and_their_repeats_the_run_is_the_same(name: str, data: st.DataObject) -> None:
    log = LOGS[name]
    whole, parts = heard(log), LiveRun("here:/runs/it")
    cuts = sorted({0, len(log), *data.draw(st.lists(st.integers(0, len(log))))})
    for begin, end in pairwise(cuts):
        early = data.draw(st.integers(0, begin))  # a message that was not answered is sent again, with what came since
        parts.hear(Message(parts.key, "a", early, log[early:end], LAYERS if early == 0 else ()), 5.0)
    assert parts == whole
    assert shown(parts) == shown(whole)


def test_what_cannot_be_read_changes_nothing() -> None:
    log = LOGS["sgwu"]
    strange: list[Event] = [{"event": "of a later version"}, {"event": "round", "worker": 3}, {"no": "event"}]
    assert shown(heard([*log, *strange])) == shown(heard(log))


def test_lanes_last_as_long_as_the_workers_were_measured() -> None:
    found = shown(heard(LOGS["sgwu"]))
    assert found.lanes == ("w0", "w1")
    for lane in found.lanes:
        for kind, of_a_round in zip(SPENT, (0.1, 0.4, 0.1, 0.1, 0.2), strict=True):
            lasted = sum(part.end - part.begin for part in found.parts if (part.row, part.name) == (lane, kind))
            assert lasted == pytest.approx(4 * of_a_round, rel=0.2)
        own = sorted((part.begin, part.end) for part in found.parts if part.row == lane)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))


@given(st.integers(1, 40), st.integers(1, 4))
def test_images_and_bytes_per_second_add_up_to_those_of_the_rounds(many: int, workers: int) -> None:
    names = [f"w{i}" for i in range(workers)]
    run = heard(rounds(many, *names))
    rows = run.history.rows
    until = min(max(row.at for row in rows if row.worker == name) for name in names)
    figures = shown(run).figures
    for name, curve, each in (("throughput", "images", 100), ("traffic", "up", 1e-3), ("traffic", "down", 2e-3)):
        if name not in figures:
            continue
        xs, ys = figures[name].curves[curve]
        width = xs[1] - xs[0] if len(xs) > 1 else 0.0
        assert sum(ys) * width <= each * len(rows) * 1.001
        assert all(0 <= x <= until for x in xs)
        assert all(y >= 0 for y in ys)


def test_pushes_are_drawn_for_rules_that_have_stale_ones() -> None:
    assert not {"staleness", "gamma"} & set(shown(heard(LOGS["sgwu"])).figures)
    stale = shown(heard(rounds(3, "w0", "w1", staleness=2, gamma=0.5))).figures
    assert stale["staleness"].points["w0"][1] == [2.0] * 3
    assert stale["gamma"].points["w1"][1] == [0.5] * 3


def test_the_network_is_drawn_with_who_has_which_kernels() -> None:
    shards = {"w0": {"conv1": 20}, "w1": {"conv1": 6}, "w2": {"conv1": 0}}
    found = shown(heard([*LOGS["layer"][:2], {"event": "shards", "home": "w0", "kernels": shards, "at": 1002.0}]))
    boxes = [(box.name, box.begin, box.end, box.text) for box in found.boxes]
    assert boxes == [
        ("w0", 0.0, pytest.approx(20 / 26), "20"),
        ("w1", pytest.approx(20 / 26), 1.0, "6"),
        ("", 0.0, 1.0, ""),
    ]
    assert found.table[0] == ("conv1", "Conv(kernels=26)", "32×32×26", "100", "w0 20, w1 6")
    assert found.lanes[:2] == ("w0, 20 kernels", "w1, 6 kernels")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Bokeh's own
def test_workers_of_a_network_have_colours_of_their_own_on_which_their_names_are_read() -> None:
    pytest.importorskip("bokeh")
    from daskcnn.dashboard.page import box_rows

    wide = [ShownBar("conv1", f"w{i}", i / 4, (i + 1) / 4, "5") for i in range(4)]
    narrow = [ShownBar("conv2", f"w{i}", i / 12, (i + 1) / 12, "2") for i in range(12)]
    rows = box_rows([*wide, *narrow, ShownBar("loss", "", 0.0, 1.0)])
    colours = {name: colour for _, _, _, colour, name, *_ in rows}
    assert len({*colours.values()}) == len(colours) == 13, "twelve workers, and home"
    assert all(sum(bytes.fromhex(colour[1:])) > 255 for colour in colours.values()), "black text is read on them"
    assert [row[-1] for row in rows[:5]] == ["w0 5", "w1 5", "w2 5", "w3 5", "2"]


def test_without_divided_kernels_there_is_the_table_alone() -> None:
    found = shown(heard(LOGS["sgwu"]))
    assert (found.layers, found.boxes) == ((), ())
    assert [row[0] for row in found.table] == ["conv1", "relu1"]


def test_merges_are_not_called_steps() -> None:
    """One worker alone has a merge a round, of many steps."""
    merges = heard(rounds(6, "w0"))
    assert "merges 6" in heading(merges, 5.0)
    assert "  merges 6  " in merges.lines[-1][1]
    part = {"name": "w0", "busy": 3.0, "wait": 1.0, "samples": 100}
    sharded = heard(timed([*run_events.layer_sharded(), run_events.epoch(step=650, workers=[part])]))
    assert "step 650" in heading(sharded, 5.0)
    assert "  step 650  " in sharded.lines[-1][1]


def test_steps_of_sharded_layers_show_loss_and_speed_within_an_epoch() -> None:
    log = timed([run_events.start(strategy="layer", batch_size=50), *run_events.layer_sharded()[1:]])
    figures = shown(heard([*log, run_events.steps(step=660, seconds_per_step=0.5) | {"at": 1009.0}])).figures
    assert figures["loss"].curves["steps"][1] == [1.9, 1.9]
    assert figures["throughput"].curves["images"][1] == pytest.approx([50 / 0.213, 100.0])


def test_a_worker_that_is_calibrated_has_a_lane_that_says_so() -> None:
    log = [run_events.start(), {"event": "calibrating", "worker": "w0", "doing": "compiling", "done": 3, "of": 40}]
    assert shown(heard(timed(log))).lanes == ("w0, compiling 3/40",)


def test_a_run_says_that_it_calibrates_from_its_start_to_its_first_calibration() -> None:
    log = [run_events.start()]
    assert heading(heard(timed(log)), 5.0).splitlines()[1].startswith("calibrating: epoch 0 of 10")
    log += [{"event": "resume", "step": 2, "epoch": 2.75}]
    assert heading(heard(timed(log)), 5.0).splitlines()[1].startswith("calibrating: epoch 2.75 of 10")
    log += [run_events.calibration("w0"), {"event": "calibrating", "worker": "w1", "doing": "compiling"}]
    assert heading(heard(timed(log)), 5.0).splitlines()[1].startswith("training: epoch 2.75 of 10")


def test_the_heading_says_how_far_the_run_is_and_when_nothing_is_heard() -> None:
    run = heard(LOGS["sgwu"])
    assert "training: epoch 3.4 of 10" in heading(run, run.heard) or "training: epoch 0.4 of 10" in heading(run, 5.0)
    assert "nothing heard" not in heading(run, run.heard + 1)
    assert "nothing heard for 1:00" in heading(run, run.heard + 60)
    ended = heard([*LOGS["sgwu"], {"event": "end", "status": "done", "at": 2000.0, "test": {"accuracy": 0.5}}])
    assert heading(ended, 9e9).splitlines()[1].startswith("done: ")
    assert "test 50.0 %" in heading(ended, 9e9)


def test_a_resumed_run_goes_on_where_its_checkpoint_is() -> None:
    log = rounds(3, "w0")
    again = [run_events.start(), {"event": "resume", "step": 2}, run_events.calibration("w0", "w1")]
    run = heard(log)
    run.hear(Message(run.key, "b", 0, timed(again), ()), 6.0)
    assert [look.step for look in run.history.looks] == [1, 2]
    assert set(run.board.workers) == {"w0", "w1"}
    assert run.layers, "they were told once"


def test_the_best_of_a_resumed_run_is_that_of_its_checkpoint() -> None:
    """What was better behind the checkpoint is undone."""
    run = heard(timed([run_events.start(), run_events.epoch(step=2, validation={"loss": 1.0, "accuracy": 0.9})]))
    goes_on = {"event": "resume", "step": 1, "epoch": 1.0, "best": 0.7}
    again = [run_events.start(), goes_on, run_events.epoch(step=2, validation={"loss": 1.0, "accuracy": 0.6})]
    run.hear(Message(run.key, "b", 0, timed(again)), 6.0)
    assert "validation 60.0 % (best 70.0 %)" in heading(run, 6.0)
    run.hear(Message(run.key, "c", 0, timed([*again[:2], run_events.epoch(step=2, validation={"loss": 0.5})])), 7.0)
    assert run.board.least_validation_loss == pytest.approx(1 / 0.7 - 1), "where there are no accuracies"


def test_seconds_left_go_by_a_clock_that_is_not_set() -> None:
    log = rounds(4, "w0")
    later = [{**event, "at": event["at"] + 3600.0} for event in log[6:]]
    jump = {"event": "clock", "seconds": 3600.0, "at": log[6]["at"] + 3599.9}
    assert heading(heard([*log[:6], jump, *later]), 5.0) == heading(heard(log), 5.0)


def test_a_resumed_run_is_the_latest() -> None:
    runs = Runs()
    for name, feed in (("it", "a"), ("other", "b"), ("it", "c")):
        runs.hear(Message(f"here:/runs/{name}", feed, 0, timed([run_events.start(run=f"/runs/{name}")])), 0.0)
    assert [name for _, name in runs.labels()] == ["it", "other"]


def test_the_throughput_of_a_run_that_was_killed_and_resumed_is_what_it_is() -> None:
    """Ten rounds of 100 images in a second each, four of which are made again."""
    run = heard(timed([run_events.start(), run_events.calibration("w0")], every=0.0))
    lap = {"busy": 1.0, "wait": 0.0, "communication": 0.0, "evaluation": 0.0, "samples": 100}

    def laps(first: int, began: float) -> list[Event]:
        log = list[Event]()
        for i in range(first, 10):
            at = {"at": began + 1.0 + i - first}
            log += [run_events.round_of("w0", round=i, epoch=(i + 1) / 10, **lap) | at]
            log += [{"event": "checkpoint", "path": "c", "step": i + 1} | at]
        return log

    again = [run_events.start(), {"event": "resume", "step": 6, "epoch": 0.6}, run_events.calibration("w0")]
    run.hear(Message(run.key, "a", 2, laps(0, 1000.0)), 6.0)
    run.hear(Message(run.key, "b", 0, [{"at": 2000.0, **event} for event in again]), 7.0)
    run.hear(Message(run.key, "b", 3, laps(6, 2000.0)), 8.0)
    assert shown(run).figures["throughput"].curves["images"][1] == pytest.approx([100.0] * 40)


# --- bounds ---


def test_two_hours_of_events_take_no_more_memory_than_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "MOST_ROUNDS", 100)
    run, sizes = LiveRun("here:/runs/long"), list[int]()
    head, log = rounds(0, "w0", "w1"), rounds(3600, "w0", "w1", staleness=1)[2:]
    checkpoints = [{"event": "checkpoint", "step": i + 1, "path": "there", "at": 1000.0 + i} for i in range(3600)]
    run.hear(Message(run.key, "a", 0, head), 0.0)
    first = len(head)
    for i in range(0, 3600, 200):
        batch = [*log[3 * i : 3 * (i + 200)], *checkpoints[i : i + 200]]
        run.hear(Message(run.key, "a", first, batch), float(i))
        first += len(batch)
        sizes.append(len(pickle.dumps(run)))
    assert max(sizes[len(sizes) // 2 :]) <= 1.1 * max(sizes[2 : len(sizes) // 2])
    found = shown(run)
    assert len(found.parts) <= MOST_PARTS
    assert len(found.lines) <= MOST_LINES
    xs, _ = found.figures["accuracy"].curves["validation"]
    assert xs[0] < 0.1 * xs[-1], "accuracy is shown from the start on"
    assert run.history.looks[-1].step == 3600


def test_bounds_are_those_that_are_kept() -> None:
    run = heard(rounds(2 * MOST_ROUNDS, "w0", "w1"))
    assert MOST_ROUNDS <= len(run.history.rows) < 2 * MOST_ROUNDS
    assert len(run.history.there) <= len(run.history.rows)
    assert count(run.history.looks[-1].step) == count(2 * MOST_ROUNDS)


@given(st.lists(st.tuples(st.integers(0, 2 * MOST_RUNS), st.booleans()), max_size=80))
def test_runs_are_bounded_and_the_one_that_was_just_heard_is_there(messages: list[tuple[int, bool]]) -> None:
    runs, firsts = Runs(), dict[str, int]()
    for now, (number, ends) in enumerate(messages):
        key = f"here:/runs/{number}"
        if key not in runs.runs:
            firsts[key] = 0
        batch = [run_events.start(run=f"/runs/{number}"), *([{"event": "end", "status": "done"}] if ends else [])]
        runs.hear(Message(key, "a", firsts[key], timed(batch)), float(now))
        firsts[key] += len(batch)
        assert key in runs.runs
        assert len(runs.runs) <= MOST_RUNS
    assert {name for _, name in runs.labels()} == {key.rpartition("/")[2] for key in runs.runs}


def test_a_run_that_has_ended_is_forgotten_before_one_that_goes_on() -> None:
    runs = Runs()
    for i in range(MOST_RUNS + 1):
        log = [run_events.start(), *([{"event": "end", "status": "done"}] if i == 3 else [])]
        runs.hear(Message(f"{i}", "a", 0, timed(log)), float(i))
    assert "3" not in runs.runs
    assert "0" in runs.runs


def test_runs_of_one_name_are_told_apart() -> None:
    runs = Runs()
    for host in ("one", "two"):
        runs.hear(Message(f"{host}:/runs/it", "a", 0, timed([run_events.start(run="/runs/it")])), 0.0)
    assert runs.labels() == [("two:/runs/it", "it (two:/runs/it)"), ("one:/runs/it", "it (one:/runs/it)")]


@pytest.mark.parametrize("module", ["daskcnn.dashboard", "daskcnn.dashboard.site", "daskcnn.dashboard.live_run"])
def test_the_schedulers_process_loads_nothing_heavy(module: str) -> None:
    heavy = {"numba", "llvmlite", "zarr", "cupy", "matplotlib"}
    code = f"import sys, {module}; sys.exit(', '.join({heavy!r} & set(sys.modules)) or 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
