"""The choice of a strategy against simulated time, and `daskcnn plan --strategies`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from daskcnn.cli import main as daskcnn
from daskcnn.events import CalibratedWorker, RoundEnded, StrategyChosen, WorkerLeftOut, parse
from daskcnn.show.lines import describe
from daskcnn.show.renderers.run_text import format_report
from daskcnn.show.report_tables import tables
from daskcnn.sim.cluster import SimulatedCluster, step_problem
from daskcnn.sim.measured import calibrated_worker, measured_cluster
from daskcnn.sim.workload import Workload
from daskcnn.training.strategy_choice import choose
from daskcnn.training.strategy_prices import StepProblem, priced_set, worker_cost
from tests.sim.sim_cases import cluster, of, run, seconds, workload

STEPS = 100
ROOM = """
[[worker]]
name = "desk"
count = 2
images_per_second = 2000
bandwidth = 1.25e8
latency = 2e-4
[[worker]]
name = "old"
images_per_second = 300
bandwidth = 1.25e7
latency = 1e-3
"""
JOB = '[data]\nname = "cifar10"\n[model]\nname = "quick"\n[train]\nstrategy = "sgwu"\nbatch_size = 64\n'


def problem(on: SimulatedCluster, batch: int, nbytes: int) -> StepProblem:
    return step_problem(on.members(), batch, nbytes, on)


# --- against simulated time ---


@pytest.mark.parametrize("fixed", [0.0, 0.05])
@pytest.mark.parametrize("server", [{}, {"bandwidth": 1e5, "merge_rate": 1e6}], ids=["free", "shared"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_step_is_expected_to_take_what_it_takes_in_simulated_time(number: int, server: Any, fixed: float) -> None:
    own = {"step_fixed": fixed, "bandwidth": 2e4, "latency": 0.01}
    on = cluster(*[100.0] * number, server=server, costs={"exchange": 0.002}, **own)
    job = workload("bsp", rule={"every": 1}, samples=64 * STEPS, batch_size=64, validation=0, numbers=250)
    expected = priced_set(problem(on, 64, job.nbytes), [member.name for member in on.members()])
    assert seconds(job, on) == pytest.approx(STEPS * expected.step_seconds, rel=0.02)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("bandwidth", [1e3, 2e4])
def test_local_steps_are_expected_to_take_what_they_take_beside_their_meetings(
    bandwidth: float, overlaps: bool
) -> None:
    on = cluster(100.0, 50.0, bandwidth=bandwidth, latency=0.01, costs={"exchange": 0.002})
    own = {"samples": 96 * STEPS, "batch_size": 64, "validation": 0, "numbers": 250, "epochs": 2}
    step = replace(problem(on, 64, 1000), epoch=own["samples"], overlaps=overlaps)
    expected = priced_set(step, ["w0", "w1"], "local-sgd")
    job = workload("local-sgd", partition="idpa", rule={"every": expected.every}, overlap=overlaps, **own)
    assert seconds(job, on) == pytest.approx(2 * own["samples"] * expected.step_seconds / expected.step, rel=0.05)
    hidden = replace(step, overlaps=not overlaps)
    assert (expected.exchange < priced_set(hidden, ["w0", "w1"], "local-sgd").exchange) is overlaps


def test_the_chosen_workers_are_sooner_in_simulated_time_than_all_and_than_one() -> None:
    on = cluster(2000.0, 1500.0, 300.0, bandwidth=1.25e8, latency=2e-4)
    old = on.worker[2].model_copy(update={"bandwidth": 1.25e7, "latency": 1e-3})
    on = on.model_copy(update={"worker": [*on.worker[:2], old]})
    job = workload("bsp", rule={"every": 1}, samples=64 * STEPS, batch_size=64, validation=0, numbers=90_000)
    chosen = choose(problem(on, 64, job.nbytes)).chosen
    assert chosen.workers == ("w0", "w1")
    took = seconds(job, on.without(["w2"]))
    assert took < min(seconds(job, on), seconds(job, on.without(["w1", "w2"])))


def test_fixed_seconds_of_a_step_are_told_from_those_of_its_samples() -> None:
    row = CalibratedWorker(name="gpu", device="gpu", images_per_second=64 / 0.007, step_fixed=0.006)
    cost = worker_cost(row, 0.007 / 64, 64)
    assert cost.seconds(64) == pytest.approx(0.007)
    assert cost.seconds(1) == pytest.approx(0.006 + 0.001 / 64)
    worker = calibrated_worker(row, 64)
    assert worker.step(64) == pytest.approx(0.007)
    assert worker.rate(64) == pytest.approx(64 / 0.007)
    assert (
        worker_cost(row.model_copy(update={"step_fixed": 1.0}), 0.007 / 64, 64).each > 0
    )  # a measurement may be wrong


def test_a_simulated_run_gives_back_the_cluster_it_ran_on_with_its_fixed_seconds() -> None:
    on = cluster(100.0, 100.0, step_fixed=0.05, latency=0.01)
    job = workload("bsp", rule={"every": 1}, samples=64 * STEPS, batch_size=64, numbers=250)
    found = measured_cluster(run(job, on)[1], job)
    assert [own.step_fixed for own in found.worker] == pytest.approx([0.05, 0.05])
    assert [own.images_per_second for own in found.worker] == pytest.approx([100.0, 100.0])
    assert seconds(job, found) == pytest.approx(seconds(job, on), rel=0.01)


def test_where_steps_are_not_those_of_one_machine_it_is_said_that_they_need_more_epochs() -> None:
    found = choose(problem(cluster(1000.0, 1000.0, bandwidth=5e6, latency=1e-3), 64, 360_000))
    text = " ".join(describe(found.event()))
    assert found.chosen.strategy == "local-sgd"
    needs = f"to the same accuracy, for which the job needs {found.chosen.needed:.2f} times its epochs"
    assert needs in text
    assert "helps: without it the progress of one shared step takes " in text


# --- `daskcnn plan --strategies` ---


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("room.toml").write_text(ROOM)


def plan(*options: str) -> str:
    result = CliRunner().invoke(daskcnn, ["plan", "job.toml", "--cluster", "room.toml", "--strategies", *options])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("files")
def test_it_says_who_helps_who_is_left_out_and_why_by_the_seconds_of_a_step() -> None:
    text = plan()
    assert "chosen: bsp on desk-1, desk-2, 1.45 times as fast as desk-1 alone" in text
    assert "desk-1  helps: without it a step takes 44.6 % longer" in text
    assert "old     left out: with it a step would take 66 ms instead of 22.1 ms" in text
    assert "with links 25.8 times as fast: bsp on desk-1, desk-2, old" in text


@pytest.mark.usefixtures("files")
def test_workers_are_left_out_and_added_as_in_a_plan() -> None:
    text = plan("--without", "desk")
    assert "chosen: old alone: there is one worker, which exchanges nothing" in text
    assert "desk-1+1" in plan("--add", "desk-1=1")
    options = ["plan", "job.toml", "--cluster", "room.toml", "--strategies", "--without", "nobody"]
    assert "no worker of this name" in CliRunner().invoke(daskcnn, options).output


@pytest.mark.usefixtures("files")
def test_its_json_is_the_event_of_a_run() -> None:
    event = parse({"event": "strategy", **json.loads(plan("--json"))})
    assert isinstance(event, StrategyChosen)
    assert "\n".join(describe(event)) + "\n" == plan()
    seconds = [each.seconds for each in event.candidates if each.needed == 1]
    assert seconds == sorted(seconds)


# --- `strategy = "auto"` ---


def room() -> SimulatedCluster:
    """Two desktops, and an old one behind a slow link."""
    on = cluster(2000.0, 1500.0, 300.0, bandwidth=1.25e8, latency=2e-4)
    old = on.worker[2].model_copy(update={"bandwidth": 1.25e7, "latency": 1e-3})
    return on.model_copy(update={"worker": [*on.worker[:2], old]})


def job(strategy: str) -> Workload:
    sizes = {"samples": 64 * STEPS, "batch_size": 64, "validation": 64, "numbers": 90_000, "epochs": 4}
    return workload(strategy, partition="idpa", increments=3, **sizes)


def test_auto_leaves_out_by_name_the_worker_that_costs_more_than_it_brings() -> None:
    simulation, events = run(job("auto"), room())
    (chosen,) = of(StrategyChosen, events)
    assert [*chosen.candidates[0].samples] == ["w0", "w1"]
    (out,) = of(WorkerLeftOut, events)
    assert out.worker == "w2"
    assert "with it a step would take" in out.reason
    assert {event.worker for event in of(RoundEnded, events)} == {"w0", "w1"}
    assert sum(event.samples for event in of(RoundEnded, events)) == 4 * 64 * STEPS
    assert simulation.now == pytest.approx(seconds(job("bsp"), room().without(["w2"])))


@pytest.mark.parametrize("bandwidth", [1e6, 5e6, 1.25e8, 1.25e9])
@pytest.mark.parametrize("speeds", [(1000.0,), (1000.0, 1000.0), (1000.0, 100.0), (2000.0, 1000.0, 300.0, 300.0)])
def test_auto_is_never_later_than_all_workers_or_the_fastest_one(speeds: Any, bandwidth: float) -> None:
    on = cluster(*speeds, bandwidth=bandwidth, latency=5e-4)
    fastest = on.without([member.name for member in on.members()[1:]])
    assert seconds(job("auto"), on) <= 1.02 * min(seconds(job("bsp"), on), seconds(job("bsp"), fastest))


def test_the_report_has_the_choice() -> None:
    report = tables(run(job("auto"), room())[1])
    shown = format_report(report)
    assert "choice of strategy and workers\n  strategy " in shown
    assert "chosen: bsp on w0, w1, 1." in shown
    assert "w2 is left out: with it a step would take" in shown
    assert report.to_dict()["choice"]["candidates"][0]["strategy"] == "bsp"
    assert report.balance is not None
    assert report.balance.workers == 2  # one that is left out is not waited for
    assert report.balance.balance == pytest.approx(1, abs=0.05)
    assert tables(run(job("bsp"), room())[1]).to_dict()["choice"] is None
