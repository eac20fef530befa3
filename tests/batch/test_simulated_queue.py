"""Queues on simulated clusters: `daskcnn simulate --queue`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from daskcnn.batch.queue_file import QueueFileError, counts_of, read_queue
from daskcnn.batch.records import Count
from daskcnn.batch.simulated_queue import SimulatedQueue, simulate_queue
from daskcnn.cli import main as daskcnn
from daskcnn.sim.cluster import ClusterFileError

JOB = """
[data]
name = "cifar10"
limit = 4000
[model]
layers = [{layer="conv",kernels=8,size=3,pad=1},{layer="relu"},{layer="maxpool",size=8},{layer="dense",units=10}]
[train]
strategy = "bsp"
epochs = 3
"""
CLUSTER = """
[server]
bandwidth = 1.25e8
[costs]
start = 1.0
[[worker]]
name = "desk"
count = 4
images_per_second = 100
bandwidth = 1.25e8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def played(folder: Path, queue: str) -> SimulatedQueue:
    (folder / "jobs.toml").write_text(queue)
    return simulate_queue(str(folder / "jobs.toml"), str(folder / "cluster.toml"))


def two_jobs(workers: str) -> str:
    return f"""
[[job]]
file = "job.toml"
name = "long"
user = "ann"
workers = "{workers}"
set = ["train.epochs=9"]
[[job]]
file = "job.toml"
name = "short"
user = "bob"
workers = "{workers}"
at = 1
"""


def test_two_elastic_jobs_against_one_after_the_other(folder: Path) -> None:
    """The bar: both are done no later than 1.1 times the sum, the short one after 0.6 times of its time at most."""
    one_after_the_other, shared = (played(folder, two_jobs(workers)) for workers in ("cpu=4", "cpu=1..4"))
    assert shared.seconds <= 1.1 * one_after_the_other.seconds
    short, before = shared.jobs[1].ended, one_after_the_other.jobs[1].ended
    assert short is not None
    assert before is not None
    assert short - 1 <= 0.6 * (before - 1)


def test_the_command_prints_jobs_lanes_and_sums(folder: Path) -> None:
    queue = (
        two_jobs("cpu=2")
        + """
[[job]]
file = "job.toml"
name = "few"
count = 2
every = 10
after = ["long"]
only = ["desk-4"]
[[job]]
file = "job.toml"
name = "many"
workers = "cpu=5"
"""
    )
    (folder / "jobs.toml").write_text(queue)
    call = ["simulate", "--queue", str(folder / "jobs.toml"), "--cluster", str(folder / "cluster.toml")]
    result = CliRunner().invoke(daskcnn, call, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["job", "name", "user", "came", "waited", "ran", "ended", "workers"]
    assert lines[1].split()[-2:] == ["desk-1,", "desk-2"]
    assert any("many" in line and line.endswith("needs 5 cpu workers: the cluster has 4") for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("|")] == ["desk-1", "desk-2", "desk-3", "desk-4"]
    assert lines[-1].startswith("4 of 5 jobs done in ")
    plain = json.loads(CliRunner().invoke(daskcnn, [*call, "--json"]).output)
    few = [job for job in plain["jobs"] if job["name"].startswith("few")]
    assert all(grant["worker"] == "desk-4" for job in few for grant in job["workers"])
    assert few[0]["ended"] <= few[1]["began"]
    assert plain["jobs"][0]["ended"] <= few[0]["began"]


def test_a_job_that_its_rule_forbids_alone_gets_the_workers_that_it_needs_or_waits(folder: Path) -> None:
    found = played(folder, '[[job]]\nfile = "job.toml"\nworkers = "cpu=2..3"\nset = ["train.strategy=\'easgd\'"]\n')
    assert found.jobs[0].ended is not None


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("cpu=2", {"cpu": Count(2, 2)}),
        ("cpu=2..4, gpu=1", {"cpu": Count(2, 4), "gpu": Count(1, 1)}),
        ("cpu=1..", {"cpu": Count(1, None)}),
    ],
)
def test_numbers_of_workers(text: str, counts: dict[str, Count]) -> None:
    assert counts_of(text) == counts


@pytest.mark.parametrize("text", ["2", "cpu", "cpu=4..2", "cpu=0", "tpu=1", ""])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        counts_of(text)


def test_all_that_is_wrong_with_a_queue_file_is_told_at_once(folder: Path) -> None:
    def problems(text: str) -> str:
        (folder / "jobs.toml").write_text(text)
        with pytest.raises(QueueFileError) as error:
            simulate_queue(str(folder / "jobs.toml"), str(folder / "cluster.toml"))
        return str(error.value)

    assert "job: is missing" in problems("")
    told = problems("[sharing]\naged = -1\n[[job]]\nfil = 'x'\n[[jobs]]\n")
    assert "sharing.aged = -1: " in told
    assert "job[0].fil: unknown key; did you mean 'file'?" in told
    assert "jobs: unknown section; did you mean 'job'?" in told
    told = problems(
        "[[job]]\nfile='job.toml'\nworkers='cpu'\n[[job]]\nfile='job.toml'\nafter=['jib']\n[[job]]\nfile='b'\ncount=1000\n"
    )
    assert "job[0].workers: 'cpu': write" in told
    assert "job[1].name = 'job': another job has it" in told
    assert "job[1].after = 'jib': no job before it has this name; did you mean 'job'?" in told
    assert "1,002 jobs" in told
    told = problems("[[job]]\nfile='job.toml'\nset=['train.epoch=2']\n[[job]]\nfile='none.toml'\n")
    assert "job.toml: train.epoch: unknown key" in told
    assert "none.toml: " in told


def test_workers_that_come_and_go_are_refused_as_their_times_are_those_of_a_run(folder: Path) -> None:
    (folder / "cluster.toml").write_text(CLUSTER + "leaves = 50.0\n")
    with pytest.raises(ClusterFileError, match="leave these keys out with --queue"):
        played(folder, two_jobs("cpu=4"))


def test_options_that_are_of_a_job_are_refused_with_a_queue() -> None:
    def said(*options: str) -> str:
        result = CliRunner().invoke(daskcnn, ["simulate", *options])
        assert result.exit_code == 2
        return result.output

    assert "--train: not of a queue" in said("--queue", "q", "--train", "--cluster", "c")
    assert "give --cluster" in said("--queue", "q")
    assert "Missing argument" in said("--cluster", "c")


def test_shares_go_by_the_numbers_of_the_file(folder: Path) -> None:
    (folder / "jobs.toml").write_text("[sharing]\naged = 60\nelastic = false\n[[job]]\nfile='job.toml'\n")
    queue = read_queue(folder / "jobs.toml")
    assert (queue.rules.aged, queue.rules.elastic) == (60, False)
