"""`daskcnn simulate` and `daskcnn plan` as a user meets them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from daskcnn.cli import main as daskcnn
from daskcnn.errors import DataError, installing
from daskcnn.events import KernelsSharded
from daskcnn.planning import paper_figures as figures
from daskcnn.planning.plan_workers import doubt
from daskcnn.planning.simulate import scenario
from daskcnn.reports import plot
from daskcnn.runs.log import read_events
from daskcnn.show import worker_plan
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.report_tables import tables
from daskcnn.show.run_figures import Figure, stacked, step_parts
from daskcnn.sim.cluster import read_cluster
from tests.tiny_runs import tiny_data

LAYERS = '[{layer="conv",kernels=8,size=3,pad=1},{layer="relu"},{layer="maxpool",size=8},{layer="dense",units=10}]'
JOB = f"""
[data]
limit = 500
validation = 100
[model]
layers = {LAYERS}
[train]
strategy = "bsp"
epochs = 3
batch_size = 16
"""
CLUSTER = """
[server]
bandwidth = 1e6
merge_rate = 1e9
[costs]
dispatch = 0.01
[[worker]]
name = "desk"
count = 2
images_per_second = 100
[[worker]]
name = "card"
kind = "gpu"
count = 0
images_per_second = 1000
"""

NAMES = ("w10", "w20", "w30")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job and a cluster in an empty folder; the data set is not there."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("cluster.toml").write_text(CLUSTER)


def invoke(*args: str) -> Result:
    result = CliRunner().invoke(daskcnn, list(args))
    assert "Traceback" not in result.output
    return result


def simulate(*args: str) -> str:
    result = invoke("simulate", "job.toml", "--cluster", "cluster.toml", *args)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*args: str) -> str:
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def test_a_simulation_shows_the_cluster_the_report_and_the_costs() -> None:
    shown = simulate()
    for part in ("cluster     cluster.toml: 2 cpu of 100 images/s", "bsp + idpa, 3 of 3 epochs in", "desk-2"):
        assert part in shown
    assert "waiting" in shown
    assert "costs by Hegde & Usmani" in shown
    assert "Downpour is saturated by T/tau:" in shown
    assert "\naccuracy" not in shown  # nothing was learnt


def test_a_simulation_as_json_has_all_figures() -> None:
    found = json.loads(simulate("--json"))
    assert found["report"]["status"] == "done"
    assert found["cluster"]["server"]["bandwidth"] == 1e6
    assert {cost["rule"] for cost in found["costs"]["table"]} == {"parallel-sgd", "admm", "downpour"}
    c = found["costs"]["constants"]
    assert found["costs"]["saturation"] == pytest.approx(c["T"] / c["tau"])
    assert c["T"] == pytest.approx(0.16)
    assert c["tau"] == pytest.approx(4 * c["p"] / 1e6)


def test_keys_of_the_job_can_be_set() -> None:
    assert "easgd + udpa" in simulate("--set", "train.strategy=easgd", "--set", "train.partition=udpa")
    assert "batch_size" in refused("simulate", "job.toml", "--cluster", "cluster.toml", "--set", "train.batch_size=0")
    assert "write section.key=value" in refused("simulate", "job.toml", "--cluster", "cluster.toml", "--set", "x")


def test_sharded_layers_have_the_step_s_parts() -> None:
    shown = simulate("--set", "train.strategy=layer")
    for part in ("a step of sharded layers", "communication", "speed-up", "by eq. 2", "at most 6.667", "conv1 kernels"):
        assert part in shown
    step = json.loads(simulate("--set", "train.strategy=layer", "--json"))["step"]
    assert step["serial"] == pytest.approx(0.15)
    assert step["ceiling"] == pytest.approx(1 / 0.15)
    assert sum(step["kernels"][0]) == 8


def test_real_arithmetic_shows_accuracies() -> None:
    shown = simulate("--train", "--set", "train.epochs=1")
    assert "validation accuracy" in shown
    assert (Path("data") / "synthetic.zarr").exists()


def test_a_simulated_run_is_kept_for_report_and_simulated_again_from_it() -> None:
    simulate("--keep", "runs/tried")
    report = invoke("report", "runs/tried")
    assert report.exit_code == 0, report.output
    assert "run         runs/tried" in report.stdout
    assert read_events(Path("runs/tried/events.jsonl"))[-1].record()["status"] == "done"
    again = invoke("simulate", "runs/tried", "--json")
    assert again.exit_code == 0, again.output
    first, second = json.loads(simulate("--json"))["report"], json.loads(again.stdout)["report"]
    assert second["seconds"] == pytest.approx(first["seconds"], rel=0.05)
    given = ["--cluster", "cluster.toml", "--train", "--set", "data.path=missing.zarr"]  # it is not looked for
    said = refused("simulate", "job.toml", *given, "--keep", "runs/tried")
    assert said.endswith("runs/tried: exists already; choose another folder with --keep, or remove it\n")


def test_a_measured_cluster_is_written_to_go_on_with() -> None:
    simulate("--keep", "runs/tried")
    command = "simulate", "job.toml", "--cluster", "runs/tried"
    result = invoke(*command, "--write-cluster", "found.toml")
    assert result.exit_code == 0, result.output
    found = read_cluster("found.toml")
    assert [worker.name for worker in found.worker] == ["desk-1", "desk-2"]
    assert found.worker[0].images_per_second == pytest.approx(100)
    assert "job.toml: exists already, and is no cluster file" in refused(*command, "--write-cluster", "job.toml")
    assert Path("job.toml").read_text() == JOB
    assert invoke(*command, "--write-cluster", "found.toml").exit_code == 0


def test_a_sharded_run_s_cluster_has_its_overhead() -> None:
    simulate("--set", "train.strategy=layer", "--keep", "runs/sharded")
    log = Path("runs/sharded/events.jsonl")
    steps = {"event": "steps", "at": 1.0, "step": 1, "epoch": 0.1, "seconds_per_step": 2.5}
    log.write_text(log.read_text() + json.dumps(steps) + "\n")
    found = json.loads(invoke("simulate", "runs/sharded", "--json").stdout)
    parts = found["step"]
    assert parts["comm"] + parts["conv"] + parts["comp"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("simulate", "job.toml"), "a job file says nothing of the cluster; give --cluster"),
        (("simulate", "nothing.toml", "--cluster", "cluster.toml"), "nothing.toml: No such file"),
        (("simulate", "job.toml", "--cluster", "nothing.toml"), "give the path of a cluster file, or of a run"),
        (("simulate", "job.toml", "--cluster", "."), "not a run directory"),
        (("simulate", "job.toml", "--cluster", "job.toml"), "data: unknown section"),
        (("plan", "job.toml", "--cluster", "cluster.toml", "--add", "tpu=1"), "there is no such kind of worker; write"),
        (("plan", "job.toml", "--cluster", "cluster.toml", "--add", "cpu=0"), "--add: adds no worker; write a kind"),
        (("plan", "job.toml", "--cluster", "cluster.toml", "--add", "cpu=x"), "write kinds or names of workers"),
        (
            ("plan", "job.toml", "--cluster", "cluster.toml", "--add", "cpu=99999999"),
            "99,999,999 workers; add 10,000 at most",
        ),
        (
            ("plan", "job.toml", "--cluster", "cluster.toml", "--add", "desk-3"),
            "the name of a worker that it is like; kn",
        ),
        (
            ("plan", "job.toml", "--cluster", "cluster.toml", "--without", "old"),
            "worker of this name; known: desk-1, desk",
        ),
        (
            ("plan", "job.toml", "--cluster", "cluster.toml", "--without", "desk"),
            "so that none is left; leave out fewer",
        ),
        (("plan", "job.toml", "--cluster", "cluster.toml", "--without", "desk-1,"), "write names of workers, such as"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_a_remedy(args: tuple[str, ...], problem: str) -> None:
    assert problem in refused(*args)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("data.validation=500",), "data.validation = 500: leaves 0 of 500 training samples; lower it"),
        (
            ("train.strategy=layer", "model.layers=[{layer='dense',units=10}]"),
            "no convolution to shard; choose another",
        ),
        (("model.layers=[{layer='dense',units=9}]",), "of 10 classes"),
    ],
)
def test_a_job_that_cannot_be_simulated_is_refused(settings: tuple[str, ...], problem: str) -> None:
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert problem in refused("simulate", "job.toml", "--cluster", "cluster.toml", *flags)


def test_a_rule_that_needs_more_workers_is_refused() -> None:
    Path("cluster.toml").write_text('[[worker]]\nname = "one"\nimages_per_second = 5\n')
    problem = refused("simulate", "job.toml", "--cluster", "cluster.toml", "--set", "train.strategy=admm")
    assert "2 workers or more" in problem


def test_a_data_set_that_is_not_here_is_known_by_its_name() -> None:
    chosen = scenario("job.toml", "cluster.toml", ["data.name=cifar10", "data.limit=null", "data.limit=20000"])
    assert (chosen.samples, chosen.images.shape) == (19_900, (32, 32, 3))


def test_a_data_set_of_any_name_is_read_where_it_is(tmp_path: Path) -> None:
    path = tiny_data(tmp_path, name="ships", shape=(16, 16, 4))
    chosen = scenario("job.toml", "cluster.toml", [f"data.path={path}", "data.validation=20"])
    assert (chosen.samples, chosen.images.shape) == (100, (16, 16, 4))
    assert chosen.about["dataset"] == "ships"


def test_a_data_set_that_is_neither_here_nor_known_is_refused() -> None:
    words = "no data set here; correct data.path (--data), or make it there: `daskcnn data prepare folder"
    assert words in refused("simulate", "job.toml", "--cluster", "cluster.toml", "--set", "data.name=ships")
    assert words in refused("simulate", "job.toml", "--cluster", "cluster.toml", "--set", "data.path=ships.zarr")


# --- plan ---


def plan(*args: str) -> Any:
    result = invoke("plan", "job.toml", "--cluster", "cluster.toml", "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_adds_one_worker_at_a_time() -> None:
    rows = plan("--add", "gpu=1,cpu=3")["rows"]
    assert [(row["workers"], row["added"]) for row in rows] == [
        (2, ""),
        (3, "gpu"),
        (4, "cpu"),
        (5, "cpu"),
        (6, "cpu"),
    ]
    for before, row in pairwise(rows):
        assert row["gain"] == pytest.approx(1 - row["epoch"] / before["epoch"])
        assert row["speedup"] == pytest.approx(rows[0]["epoch"] / row["epoch"])
        assert 0 <= row["communication"] < 1
        assert 0 < row["balance"] <= 1
    assert rows[1]["speedup"] > 2


def test_a_plan_says_from_where_on_another_worker_does_not_pay() -> None:
    """The 16th of equal workers would shorten an epoch by 1/16 at the best, the 21st by less than 5 %."""
    Path("cluster.toml").write_text('[[worker]]\nname = "a"\nimages_per_second = 100\nevaluations_per_second = 1e9\n')
    rarely = ("--set", "data.limit=5000", "--set", "train.strategy=sgwu")  # no step's samples are to be cut evenly
    found = plan("--add", "cpu=2", *rarely)
    (verdict,) = found["verdicts"]
    assert verdict["further"] + 3 == pytest.approx(20, abs=2)
    assert verdict["stops"]["workers"] == verdict["further"] + 4
    assert verdict["stops"]["gain"] < 0.05
    again = plan("--add", "cpu=25", *rarely)
    assert again["verdicts"][0]["stops"]["workers"] == verdict["stops"]["workers"]
    assert again["verdicts"][0]["further"] is None


def test_every_kind_has_a_verdict_in_words() -> None:
    result = invoke("plan", "job.toml", "--cluster", "cluster.toml", "--add", "gpu=2,cpu=1")
    table, _, verdicts = result.stdout.strip().rpartition("\n\n")
    assert table.splitlines()[0].split()[:4] == ["workers", "added", "the", "run"]
    gpu, cpu = verdicts.splitlines()
    assert gpu.startswith("gpu  ")
    assert cpu.startswith("cpu  does not pay from the 5th worker on, which costs ")


def test_a_plan_for_sharded_layers_goes_by_the_step_model() -> None:
    rows = plan("--add", "cpu=2", "--set", "train.strategy=layer")["rows"]
    assert [row["workers"] for row in rows] == [2, 3, 4]
    assert rows[0]["communication"] > 0


def test_a_plan_for_sharded_layers_says_why_another_worker_does_not_pay() -> None:
    """Of a network of residual blocks, over links that carry next to nothing."""
    worker = "[[worker]]\nname = 'a'\nimages_per_second = 100\nbandwidth = 1e4\nlatency = 0.1\n"
    Path("cluster.toml").write_text(worker)
    Path("job.toml").write_text(JOB.replace(f"layers = {LAYERS}", "name = 'resnet20'"))
    found = plan("--add", "cpu=1", "--set", "train.strategy=layer")
    (verdict,) = found["verdicts"]
    assert verdict["stops"]["workers"] == 2
    assert verdict["reason"].startswith("of residual")
    assert "its share is not worth what it takes to send" in verdict["reason"]


def test_the_reason_is_that_of_the_worker_that_is_added() -> None:
    """And not that of a laptop on a slow link, which is idle before and after."""
    workers = (
        "name = 'desk'\nimages_per_second = 100\nbandwidth = 1e8\n",
        "name = 'laptop'\nimages_per_second = 9\nbandwidth = 1e4\n",
    )
    Path("cluster.toml").write_text("".join(f"[[worker]]\n{own}latency = 0.01\n" for own in workers))
    (verdict,) = plan("--add", "cpu=1", "--set", "train.strategy=layer")["verdicts"]
    assert verdict["stops"] is not None
    assert "its link (100 MB/s, 10 ms a message)" in verdict["reason"]


def test_ordinals() -> None:
    found = [worker_plan._ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)]
    assert found == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]


def test_a_plan_alone_leaves_each_worker_out_in_turn() -> None:
    """And last all slow ones that do not pay by themselves: behind a barrier others wait for what they judge."""
    desks = '[[worker]]\nname = "desk"\ncount = 3\nimages_per_second = 400\n'
    Path("cluster.toml").write_text(f'{desks}[[worker]]\nname = "old"\ncount = 2\nimages_per_second = 20\n')
    whole, *others = plan()["rows"]
    assert (whole["workers"], whole["without"], whole["gain"]) == (5, [], None)
    assert [row["without"] for row in others] == [["desk-3"], ["old-2"], ["old-1", "old-2"]]
    for row in others:
        assert row["workers"] == 5 - len(row["without"])
        assert row["seconds"] == pytest.approx(3 * row["epoch"])
        assert row["gain"] == pytest.approx(1 - whole["epoch"] / row["epoch"])
        assert row["speedup"] == pytest.approx(whole["epoch"] / row["epoch"])
    shown = invoke("plan", "job.toml", "--cluster", "cluster.toml").stdout
    assert re.search(r"^old-2 {9}(no|little) help: with it an epoch is", shown, re.M)
    assert re.search(r"^old-1, old-2  no help: with them an epoch is \d+.\d % longer$", shown, re.M)
    only = plan("--without", "old")["rows"]
    assert only == [whole, others[-1]]


def test_a_plan_of_one_uneven_entry_leaves_one_out_and_never_all() -> None:
    uneven = "unequal = {lowest = 0.5, highest = 1.5}"  # the first of three may be below their mean
    Path("cluster.toml").write_text(f'[[worker]]\nname = "desk"\ncount = 3\nimages_per_second = 400\n{uneven}\n')
    assert [row["without"] for row in plan()["rows"]] == [[], ["desk-3"]]


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_a_plan_counts_the_time_before_the_first_worker_comes(strategy: str) -> None:
    late = '[[worker]]\nname = "late"\nimages_per_second = 4000\narrives = 3600\n'
    Path("cluster.toml").write_text(f'[[worker]]\nname = "desk"\ncount = 2\nimages_per_second = 400\n{late}')
    row = plan("--without", "desk", "--set", f"train.strategy={strategy}")["rows"][1]
    assert row["seconds"] > 3600
    assert row["gain"] > 0.9


def test_a_comparison_of_strategies_says_that_it_plays_no_changes() -> None:
    late = '[[worker]]\nname = "late"\nimages_per_second = 4000\n'
    slower = 'speed = {kind = "drift", to = 0.5, seconds = 60}'
    for more, warned in (("", False), ("leaves = 60", True), (slower, True)):
        Path("cluster.toml").write_text(f'[[worker]]\nname = "desk"\nimages_per_second = 400\n{late}{more}')
        shown = invoke("plan", "job.toml", "--cluster", "cluster.toml", "--strategies")
        assert ("takes all workers as there" in shown.output) is warned


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "layer"])
def test_all_but_one_left_out_is_that_one_alone(strategy: str) -> None:
    names = ("new", "middle", "old")
    each = [f"[[worker]]\nname = '{n}'\nimages_per_second = {100 / 2**i}\n" for i, n in enumerate(names)]
    settings = ("--set", f"train.strategy={strategy}")
    Path("cluster.toml").write_text("".join(each))
    left = {name: plan("--without", ",".join({*names} - {name}), *settings)["rows"][1] for name in names}
    for name, entry in zip(names, each, strict=True):
        Path("alone.toml").write_text(entry)
        alone = invoke("simulate", "job.toml", "--cluster", "alone.toml", "--json", *settings)
        assert left[name]["seconds"] == json.loads(alone.stdout)["report"]["seconds"]


def test_a_worker_left_out_and_added_again_changes_nothing() -> None:
    Path("cluster.toml").write_text("".join(f"[[worker]]\nname = '{n}'\nimages_per_second = {n[1:]}\n" for n in NAMES))
    whole, without, again = plan("--without", "w30", "--add", "w30")["rows"]
    assert (without["without"], again["added"]) == (["w30"], "w30")
    assert again["seconds"] == pytest.approx(whole["seconds"])
    assert again["gain"] == pytest.approx(without["gain"])
    assert again["speedup"] == pytest.approx(1.0)
    assert [row["added"] for row in plan("--add", "w30,w30")["rows"]] == ["", "w30", "w30"]


def test_a_worker_that_the_rule_needs_is_said_to_be_needed() -> None:
    found = plan("--set", "train.strategy=admm")
    assert len(found["rows"]) == 1
    assert "2 workers or more" in found["needed"]["desk-2"]
    shown = invoke("plan", "job.toml", "--cluster", "cluster.toml", "--set", "train.strategy=admm").stdout
    assert "desk-2  cannot be left out: " in shown


def test_the_only_worker_cannot_be_left_out() -> None:
    Path("cluster.toml").write_text('[[worker]]\nname = "one"\nimages_per_second = 5\n')
    assert "cannot be left out; add one, for example" in refused("plan", "job.toml", "--cluster", "cluster.toml")


@pytest.mark.parametrize(("strategy", "said"), [("sgwu", True), ("bsp", False), ("auto", False)])
def test_a_plan_says_where_its_epochs_are_not_those_of_one_machine(strategy: str, said: bool) -> None:
    Path("cluster.toml").write_text('[[worker]]\nname = "desk"\ncount = 2\nimages_per_second = 400\n')
    for more in ([], ["--add", "cpu=1"]):
        given = ["plan", "job.toml", "--cluster", "cluster.toml", "--set", f"train.strategy={strategy}"]
        shown = invoke(*given, *more).stdout
        assert (f"epochs are those of {strategy}: to an accuracy it may need more" in shown) is said


def test_a_plan_of_rare_meetings_counts_the_epochs_that_they_need() -> None:
    slow = "images_per_second = 400\nbandwidth = 3e5\nlatency = 0.02\n"
    Path("cluster.toml").write_text(f'[[worker]]\nname = "desk"\ncount = 2\n{slow}')
    given = ["plan", "job.toml", "--cluster", "cluster.toml", "--set", "train.strategy=auto", "--set", "train.epochs=8"]
    whole, other = json.loads(invoke(*given, "--json").stdout)["rows"]
    assert whole["needed"] > other["needed"] == 1
    assert other["gain"] == pytest.approx(1 - whole["epoch"] * whole["needed"] / other["epoch"])
    shown = invoke(*given).stdout
    assert "epochs needed: expected, for the progress of one epoch of one machine; gains count them" in shown
    assert f"the time to the same progress is {100 * other['gain']:.1f} % shorter" in shown


def test_a_worker_that_does_not_last_leaves_a_job_of_a_range_to_the_others() -> None:
    desk, old = ('[[worker]]\nname = "desk"\n', '[[worker]]\nname = "old"\ndies = 0.5\n')
    Path("cluster.toml").write_text("images_per_second = 400\n".join((desk, old, "")))
    given = ["--cluster", "cluster.toml", "--set", "train.strategy=sgwu", "--set", "cluster.workers={cpu = '2..4'}"]
    assert "it dies" in invoke("simulate", "job.toml", *given).stdout
    assert "help: with it an epoch is" in invoke("plan", "job.toml", *given).stdout


def test_a_simulated_run_that_shares_steps_needs_as_many_samples_as_one_machine() -> None:
    Path("cluster.toml").write_text('[[worker]]\nname = "desk"\ncount = 2\nimages_per_second = 400\n')
    given = ["simulate", "job.toml", "--cluster", "cluster.toml", "--train", "--set"]
    for strategy, at_most in (("bsp", False), ("sgwu", True)):
        shown = invoke(*given, f"train.strategy={strategy}").stdout
        assert ("alone would have taken about" in shown, "at most" in shown) == (True, at_most)


def test_a_run_is_its_own_cluster_to_plan_with() -> None:
    names = "büro", "ann@home", "desk+1"  # as workers of a run may be called
    Path("cluster.toml").write_text("".join(f"[[worker]]\nname = '{n}'\nimages_per_second = 50\n" for n in names))
    simulate("--keep", "runs/tried", "--set", "train.partition=udpa")
    shown = invoke("plan", "runs/tried")
    assert shown.exit_code == 0, shown.output
    for name in names:
        assert re.search(rf"^{re.escape(name)} +help: with it an epoch is 2\d.\d % shorter$", shown.stdout, re.M)
    for more, reason in (("nosuch", "there is no such kind of worker"), ("gpu=1", "no worker of this kind to go by")):
        refused = invoke("plan", "runs/tried", "--add", more)
        assert refused.exit_code == 2
        assert reason in refused.output
        assert "the cluster file has" not in refused.output, "none was given"


def test_what_a_run_filled_in_for_its_rule_goes_with_the_rule_and_the_rate() -> None:
    simulate("--keep", "runs/kept", "--set", "train.strategy=downpour")
    assert json.loads(Path("runs/kept/job.json").read_text())["rule"]["lower_lr"] is True

    def rate_of_two(*settings: str) -> float:
        rule = scenario("runs/kept", None, settings).job.rule
        assert rule is not None
        return rule.rate(2)

    assert rate_of_two() == rate_of_two("train.epochs=4") == 0.5
    assert rate_of_two("train.strategy=agwu") == rate_of_two("train.lr=0.02") == 1
    assert rate_of_two("train.lr=0.02", "rule.lower_lr=true") == 0.5


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (["strategy=layer"], (None, None, 1.0)),
        (["strategy=parallel-sgd"], ("idpa", 1, 1.0)),
        (["partition=udpa"], ("udpa", 1, 1.0)),
        (["epochs=1"], ("idpa", 1, 0.25)),
        (["epochs=20"], ("idpa", 4, 1.0)),
        (["epochs=1", "schedule.warmup=0.5", "increments=1"], ("idpa", 1, 0.5)),
    ],
)
def test_what_a_run_filled_in_for_its_training_goes_with_the_keys_that_it_depends_on(
    settings: list[str], found: tuple[str | None, int | None, float]
) -> None:
    simulate("--keep", "runs/kept", "--set", "train.epochs=10")
    kept = json.loads(Path("runs/kept/job.json").read_text())["train"]
    assert (kept["partition"], kept["increments"], kept["schedule"]["warmup"]) == ("idpa", 4, 1.0)
    train = scenario("runs/kept", None, [f"train.{setting}" for setting in settings]).job.train
    assert (train.partition, train.increments, train.schedule.warmup) == found


def test_what_was_given_is_still_refused_where_it_does_not_fit_the_keys_of_a_run() -> None:
    simulate("--keep", "runs/kept", "--set", "train.epochs=10", "--set", "train.increments=8")
    assert "train.increments = 8" in refused("simulate", "runs/kept", "--set", "train.epochs=4")
    given = ["--set", "train.strategy=layer", "--set", "train.partition=udpa"]
    assert "train.partition: strategy 'layer'" in refused("simulate", "runs/kept", *given)
    assert "train.epochs = 'ten'" in refused("plan", "runs/kept", "--set", "train.epochs=ten")


def test_a_run_by_momentum_is_simulated_without() -> None:
    simulate("--keep", "runs/kept", "--set", "train.optimizer=sgd")
    assert scenario("runs/kept", None, ["train.momentum=0"]).job.train.nesterov is False


def test_a_run_that_trained_alone_is_compared_with_those_that_it_left_out() -> None:
    """Its log has their calibrations and links, but no round of theirs."""
    simulate("--keep", "runs/alone", "--set", "train.epochs=2")
    path = Path("runs/alone/events.jsonl")
    log = [each for each in map(json.loads, path.read_text().splitlines()) if each.get("worker") != "desk-2"]
    links = [{"name": name, "bandwidth": 1e5, "latency": 0.05} for name in ("desk-1", "desk-2")]
    log.insert(-1, {"event": "links", "at": log[-1]["at"], "workers": links})
    path.write_text("".join(f"{json.dumps(each)}\n" for each in log))
    problem = refused("plan", "runs/alone")
    assert "give --strategies to compare it with what the run measured beside it: desk-2" in problem
    both = invoke("plan", "runs/alone", "--strategies", "--json")
    one = invoke("plan", "runs/alone", "--strategies", "--without", "desk-2", "--json")
    together, sole = (json.loads(result.stdout)["candidates"] for result in (both, one))
    shared = next(each for each in together if each["strategy"] == "bsp")
    assert {*shared["samples"]} == {"desk-1", "desk-2"}
    assert shared["exchange"] > 0.05
    assert [{*each["samples"]} for each in sole] == [{"desk-1"}]


# --- figures ---


def test_every_figure_is_drawn_and_has_its_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SIZES", (2, 4))
    monkeypatch.setattr(figures, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(figures, "THREADS", (1, 2))
    monkeypatch.setattr(figures, "POINTS", 500)
    chosen = scenario("job.toml", "cluster.toml", [])
    drawn = list(figures.paper_figures(chosen))
    assert len({figure.name for figure in drawn}) == len(drawn) == 12
    for figure in drawn:
        assert figure.curves
        for xs, ys in figure.curves.values():
            assert len(xs) == len(ys) > 0
            assert all(y >= 0 for y in ys)
            assert list(xs) == sorted(xs)


@pytest.fixture
def curve() -> Figure:
    curves = {"simulated": ([1, 2, 4], [1.0, 1.8, 2.5])}
    return Figure("speed", "Speed", "nobody", "workers", "speed-up", curves, True, {"1/f": 3.0}, {"T/τ": 2.0})


def test_a_picture_is_what_its_ending_says_and_the_same_every_time(curve: Figure) -> None:
    svg, again = (draw(curve, Path(name)).read_bytes() for name in ("a.svg", "b.svg"))
    assert svg == again
    text = "".join(ElementTree.fromstring(svg).itertext())
    for part in ("Speed", "workers", "speed-up", "simulated", "1/f", "T/τ"):
        assert part in text
    with Image.open(draw(curve, Path("a.png"))) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300


def test_bars_stand_on_one_another_and_rates_go_in_powers_of_ten(curve: Figure) -> None:
    bars = stacked("bars", "Parts", "nobody", "workers", {"one": (0.0, 4.0, 1.0), "two": (1.0, 2.0, 1.0)})
    assert bars.curves["convolutions"] == (range(2), [4.0, 2.0])
    roof = Figure("roof", "Roof", "nobody", "x", "y", {"roof": ([1, 10], [1.0, 10.0])}, rates=True)
    points = replace(roof, points={"here": ([2.0], [1.5])})
    for figure, parts in ((bars, ("convolutions", "one", "two")), (points, ("roof", "here"))):
        text = "".join(ElementTree.fromstring(draw(figure, Path("x.svg")).read_bytes()).itertext())
        assert all(part in text for part in parts)


def test_a_log_without_an_epoch_of_sharded_layers_has_no_breakdown() -> None:
    with pytest.raises(DataError, match="give a run of strategy 'layer' that ended one"):
        step_parts({"run": tables([KernelsSharded(home="w0", kernels={})])})


def test_figures_go_into_a_folder_that_is_made(curve: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "paper_figures", lambda chosen, seed: [curve])
    result = invoke("simulate", "job.toml", "--cluster", "cluster.toml", "--figures", "a/b", "--format", "png")
    assert result.exit_code == 0, result.output
    assert "figure a/b/speed.png" in result.stderr


def test_figures_where_there_can_be_no_folder_are_refused() -> None:
    result = invoke("simulate", "job.toml", "--cluster", "cluster.toml", "--figures", "job.toml")
    assert result.exit_code == 2
    assert "job.toml: File exists; give a folder that may be written" in result.stderr


def test_without_matplotlib_figures_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert f"matplotlib is not installed; {installing('plot')}" in refused(
        "simulate", "job.toml", "--figures", "pictures"
    )


def test_a_replay_that_is_far_from_its_run_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    assert doubt(str(tmp_path), 1.0) is None, "it goes on"
    (tmp_path / "summary.json").write_text('{"seconds": 10.0, "epochs": 5.0}')
    assert doubt(str(tmp_path), 1.7) is None
    assert "an epoch took 2 s, and takes 1 s by the workers' usual speeds" in str(doubt(str(tmp_path), 1.0))
    assert "an epoch took 2 s, and takes 3 s" in str(doubt(str(tmp_path), 3.0))
