from __future__ import annotations

import json
import math
from typing import Any

import pytest

from daskcnn.runs.summary import Summary, WorkerSummary
from daskcnn.runs.totals import WorkerTotals
from daskcnn.show import text
from daskcnn.show.renderers.run_text import format_report, format_summary
from tests.show.run_events import calibration, data_parallel, round_of, start, tables, worker_totals


def summary(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"run": "runs/my run", "status": "done", "strategy": "sgwu", "epochs": 10.0}
    parts |= {"seconds": 252.0, "images_per_second": 480_000 / 252, "test": {"accuracy": 0.6912, "loss": 0.912}}
    parts |= {"validation": {"accuracy": 0.7, "loss": 0.8}, "bytes": {"up": 12_345_678, "down": 950}}
    workers = [WorkerSummary.model_validate(total) for total in worker_totals(data_parallel(), 252.0)]
    parts |= {"workers": workers, "checkpoint": "runs/my run/checkpoints/step-000000375"}
    return Summary(**{**parts, **changes}).model_dump()


def test_the_summary_has_the_documented_fields() -> None:
    built = summary()
    assert list(built) == [
        "run",
        "status",
        "strategy",
        "epochs",
        "seconds",
        "images_per_second",
        "test",
        "validation",
        "bytes",
        "workers",
        "checkpoint",
        "reason",
        "weights",
        "weights_epoch",
        "alone",
        "no_kernels",
    ]
    assert built["images_per_second"] == pytest.approx(480_000 / 252)
    assert built["bytes"] == {"up": 12_345_678, "down": 950}
    assert built["workers"][1] == {
        "name": "w1",
        "device": "cpu",
        "samples": 12000,
        "busy": 5.0,
        "wait": 4.5,
        "communication": 0.5,
        "evaluation": 0.5,
        "present": 252.0,
    }


def test_the_summary_says_that_its_figures_are_of_the_best_weights() -> None:
    told = format_summary(summary(weights="best", weights_epoch=7.0))
    assert "weights     the best on the validation samples, of epoch 7: the figures are theirs" in told
    assert "weights" not in format_summary(summary())


def test_the_summary_says_what_the_cluster_brought() -> None:
    alone = {"worker": "w1", "epoch": 2.0, "accuracy": 0.6, "seconds": 47.0, "alone": 60.0, "at_most": False}
    told = format_summary(summary(alone=alone))
    line = "this cluster reached 60.0 % in 47.0 s; w1 alone would have taken about 1 min 00 s (estimated)"
    assert line in told


def test_the_summary_says_which_workers_have_no_kernels() -> None:
    lines = format_summary(summary(strategy="layer", no_kernels=["w1", "w\x1b2"])).splitlines()
    told = "no kernels  w1, w\\x1b2: a part of the work there would cost more than it saves"
    assert lines[lines.index(told) - 1].split()[0] == "w2", "the last row of the workers"
    assert "no kernels" not in format_summary(summary())


def test_the_summary_is_strict_json() -> None:
    built = summary(test={"accuracy": math.nan, "loss": math.inf}, checkpoint=None)
    assert json.loads(json.dumps(built, allow_nan=False)) == built
    assert built["test"] == {"accuracy": None, "loss": None, "auc": None, "metrics": {}}


def test_totals_add_up_over_rounds_and_a_resume() -> None:
    resumed = [calibration("w0", "w1"), round_of("w0"), round_of("w0", samples=500)]
    first, second = worker_totals(
        [*resumed, {"event": "resume", "step": 3}, *resumed, {"event": "end", "status": "done"}]
    )
    assert (first.samples, first.bytes_up, first.bytes_down) == (25_000, 4000, 8000)
    assert first.busy == pytest.approx(4 * 9.7)
    assert second == WorkerTotals("w1", "cpu")


def test_groups_take_the_place_of_their_members() -> None:
    formed = {"event": "groups", "groups": [{"name": "group-0", "members": ["w0", "w2"], "device": "2 cpu"}]}
    left_out, group = worker_totals([calibration("w0", "w1", "w2"), formed, round_of("group-0"), round_of("group-0")])
    assert (left_out.name, left_out.samples) == ("w1", 0)
    assert (group.name, group.device) == ("group-0", "2 cpu")
    assert group.samples == 2 * round_of("w0")["samples"]


def test_people_see_results_workers_and_what_to_do_next() -> None:
    assert format_summary(summary()).splitlines() == [
        "status      done",
        "training    sgwu, 10 epochs in 4 min 12 s, 1,905 images/s",
        "test        accuracy 69.1 %, loss 0.912",
        "validation  accuracy 70.0 %, loss 0.800",
        "time        busy 1.9 %, evaluation 0.1 %, waiting 0.6 %, communication 0.1 %, other 97.2 %",
        "traffic     12.3 MB up, 950 B down",
        "workers     name  device  samples   busy   wait  communication",
        "            w0    cpu      12,000  9.7 s  0.2 s          0.1 s",
        "            w1    cpu      12,000  5.0 s  4.5 s          0.5 s",
        "            w2    cpu           0  0.0 s  0.0 s          0.0 s",
        "kept in     runs/my run",
        "checkpoint  runs/my run/checkpoints/step-000000375",
        "evaluate    daskcnn evaluate 'runs/my run'",
        "report      daskcnn report 'runs/my run'",
        "page        daskcnn report 'runs/my run' --html run.html",
        "picture     daskcnn plot 'runs/my run' --out run.svg",
    ]


def test_a_narrow_terminal_breaks_no_number_and_no_path() -> None:
    run = "runs/2026-11-20T20-15-03-sgwu"
    shown = format_summary(summary(run=run, checkpoint=f"{run}/checkpoints/step-000000375"), 60).splitlines()
    assert max(map(len, shown)) <= 60
    assert shown[4:8] == [
        "time        busy 1.9 %, evaluation 0.1 %, waiting 0.6 %,",
        "            communication 0.1 %, other 97.2 %",
        "traffic     12.3 MB up, 950 B down",
        "workers",
    ]
    assert shown[8:10] == [
        "  name  device  samples   busy   wait  communication",
        "  w0    cpu      12,000  9.7 s  0.2 s          0.1 s",
    ]
    assert shown[13:15] == ["checkpoint", f"  {run}/checkpoints/step-000000375"]


@pytest.mark.parametrize("width", [1, 20, 40, 80])
def test_a_summary_of_any_width_says_the_same(width: int) -> None:
    assert format_summary(summary(), width).split() == format_summary(summary()).split()


def test_the_report_has_the_same_shares_of_time() -> None:
    report = tables([start(), *data_parallel(), {"event": "end", "status": "done", "seconds": 30.0}])
    told = format_summary(
        summary(
            seconds=report.seconds,
            workers=[WorkerSummary.model_validate(total) for total in worker_totals(data_parallel(), 30.0)],
        )
    )
    (time,) = [line.split(None, 1)[1] for line in told.splitlines() if line.startswith("time ")]
    assert time in format_report(report)


def test_what_pictures_need_is_said_where_it_is_missing() -> None:
    shown = format_summary(summary(), to_draw="pip install 'daskcnn[plot]'").splitlines()
    assert shown[-1] == "both need   pip install 'daskcnn[plot]'"


def test_a_run_without_rounds_has_no_shares() -> None:
    assert "time  " not in format_summary(summary(workers=[]))


def test_one_epoch_is_no_epochs() -> None:
    assert "sgwu, 1 epoch in" in format_summary(summary() | {"epochs": 1.0})


@pytest.mark.parametrize(
    ("status", "checkpoint", "resumable"),
    [
        ("interrupted", "c", True),
        ("lost", "c", True),
        ("lost", None, False),
        ("diverged", "c", False),
        ("done", "c", False),
    ],
)
def test_the_command_that_resumes_is_shown_where_it_helps(status: str, checkpoint: str | None, resumable: bool) -> None:
    shown = format_summary(summary(status=status, checkpoint=checkpoint))
    assert ("python -m daskcnn.run --resume 'runs/my run'" in shown) == resumable
    assert ("daskcnn evaluate" in shown) == (checkpoint is not None)


def test_what_was_not_measured_is_left_out_or_dashed() -> None:
    shown = format_summary(
        summary(test=None, validation={"accuracy": None, "loss": None}, images_per_second=None, workers=[])
    )
    assert "test " not in shown
    assert "validation  accuracy -, loss -" in shown
    assert ", - images/s" in shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.number(0.12345), "0.123"),
        (text.number(12.345), "12.35"),
        (text.number(1234.5), "1234.5"),
        (text.number(1e-5), "1e-05"),
        (text.number(0), "0.000"),
        (text.number(math.nan), "nan"),
        (text.number(None), "-"),
        (text.count(48000), "48,000"),
        (text.count(2.5), "2.5"),
        (text.count(2.0), "2"),
        (text.count(math.inf), "-"),
        (text.clock(59.6), "1:00"),
        (text.clock(7261), "2:01:01"),
        (text.duration(4.25), "4.2 s"),
        (text.duration(59.97), "1 min 00 s"),
        (text.duration(7500), "2 h 05 min"),
        (text.size(999), "999 B"),
        (text.size(999_999), "1.0 MB"),
        (text.size(3e15), "3,000.0 TB"),
        (text.percent(0.5), "50.0 %"),
        (text.percent(None), "-"),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown == expected
