"""The commands of a queue, at a spool of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daskcnn import cli
from daskcnn.batch.asking import runs_of
from daskcnn.batch.records import Count
from daskcnn.batch.spool import Spool
from daskcnn.batch.spool_folder import note_runs
from daskcnn.events import Event, Judged, RunEnded, RunStarted


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Spool(tmp_path / "spool").close()


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.main, [*words, "--spool", "spool"])


def test_a_job_is_submitted_listed_and_changed() -> None:
    Path("job.toml").write_text(
        '[train]\nepochs = 2\n[run]\nmlflow = "http://ann:geheim@host"\n[data]\npath = "x.zarr"'
    )
    flags = ["--priority", "3", "--workers", "cpu=2..4", "--only", "desk-*", "--name", "first", "--set", "train.seed=7"]
    Path("x.zarr").mkdir()
    found = call("submit", "job.toml", *flags, "--hold")
    assert (found.exit_code, found.stdout) == (0, "1\n")
    assert found.stderr.startswith(f"data.path {Path.cwd() / 'x.zarr'}: seen by ")
    with Spool(Path("spool")) as spool:
        job, (content, modules) = spool.job(1), spool.content(1)
    assert (job.state, job.priority, job.name, job.only) == ("held", 3, "first", ("desk-*",))
    assert (dict(job.workers), job.run, modules) == ({"cpu": Count(2, 4)}, str(Path.cwd() / "runs" / "first"), [])
    assert content["train"] == {"epochs": 2, "seed": 7}
    assert content["data"] == {"path": str(Path.cwd() / "x.zarr")}
    assert content["run"] == {"mlflow": "http://ann:geheim@host"}
    Path("job.toml").write_text("[train]\nepochs = 9")  # what was submitted counts
    assert call("submit", "job.toml", "--after", "1").stdout == "2\n"
    assert call("release", "1").stdout == "job 1 (first): queued\n"
    assert call("hold", "1", "2").stdout == "job 1 (first): held\njob 2 (job-2): held\n"
    lines = call("jobs").stdout.splitlines()
    assert lines[1].split()[:4] == ["1", lines[1].split()[1], "first", "held"]
    assert lines[1].endswith("held by hand")
    listed = call("jobs", "--json").stdout
    assert [(job["id"], job["state"], job["after"]) for job in json.loads(listed)] == [
        (1, "held", []),
        (2, "held", [1]),
    ]
    assert "geheim" not in listed
    assert call("cancel", "2").stdout == "job 2 (job-2): cancelled\n"
    assert call("logs", "1").stdout == ""


def test_the_usual_path_of_a_data_set_is_made_whole_by_the_submitter_s_folder_too() -> None:
    """The driver works in the service's folder, where there may be none of this name, or another one."""
    at = Path.cwd() / "data"
    refused = call("submit", "--set", "data.name=shapes")
    assert (refused.exit_code, refused.stdout) == (2, "")
    unseen = f"data.path = {at / 'shapes.zarr'}: {socket.gethostname()}, which starts the drivers, does not see it"
    assert unseen in refused.stderr
    assert call("submit", "--set", "data.name=synthetic").stdout == "1\n"
    assert call("submit").stdout == "2\n"
    for name in ("shapes", "synthetic"):
        (at / f"{name}.zarr").mkdir(parents=True)
        found = call("submit", "--set", f"data.name={name}")
        assert found.stderr.startswith(f"data.path {at / name}.zarr: seen by ")
    assert call("submit").stdout == "5\n"
    with Spool(Path("spool")) as spool:
        data = [spool.content(number)[0].get("data", {}) for number in range(1, 6)]
    assert data[:2] == [{"name": "synthetic"}, {}], "the driver makes it in its own folder"
    assert data[2:4] == [{"name": name, "path": str(at / f"{name}.zarr")} for name in ("shapes", "synthetic")]
    assert data[4] == {"path": str(at / "synthetic.zarr")}


def test_a_sweep_is_submitted_as_jobs_that_are_named_by_their_values() -> None:
    Path("job.toml").write_text("[train]\nepochs = 9")
    grid = ["--grid", "train.lr=0.01,0.02", "--grid", "train.strategy=sgwu,bsp"]
    found = call("submit", "job.toml", *grid, "--seeds", "2", "--stop", "asha", "--name", "lab")
    assert (found.exit_code, len(found.stdout.splitlines())) == (0, 8)
    assert found.stdout.splitlines()[0] == "1  lab-lr0.01-sgwu-seed0"
    with Spool(Path("spool")) as spool:
        jobs = spool.jobs(sweep="lab")
        assert [(job.name, job.sweep, job.stop) for job in jobs][-1] == ("lab-lr0.02-bsp-seed1", "lab", "asha")
        assert spool.jobs(sweep="none") == []
        assert spool.content(8)[0]["train"] == {"epochs": 9, "lr": 0.02, "strategy": "bsp", "seed": 1}
    refused = call("submit", "job.toml", "--grid", "train.lr=-1,0.1", "--grid", "train.epoch=1,2")
    assert refused.exit_code == 2
    assert "job-lr-1-epoch1, job-lr-1-epoch2: train.lr = -1" in refused.output
    assert "train.epoch: unknown key" in refused.output
    assert "--stop: ends runs of a sweep" in call("submit", "job.toml", "--stop", "asha").output
    assert len(json.loads(call("jobs", "--json").stdout)) == 8


def test_a_sweep_is_compared_by_its_name_and_jobs_by_their_numbers() -> None:
    Path("job.toml").write_text("[train]\nepochs = 1")
    call("submit", "job.toml", "--grid", "train.strategy=bsp,sgwu", "--seeds", "2", "--name", "lab")
    assert "none of its jobs has begun" in call("compare", "lab").output
    with Spool(Path("spool")) as spool:
        jobs = spool.jobs(sweep="lab")
        spool.begin(1, ["desk-1"], 1.0, boot="", step=-1)
    assert f"no run can be seen from here ({jobs[0].run})" in call("compare", "lab").output
    for job in jobs[:3]:  # the last one has not begun
        judged = Judged(loss=1.0, accuracy=0.5 + 0.1 * job.id)
        told: list[Event] = [RunStarted(run=job.name, at=0.0), RunEnded(status="done", test=judged, at=9.0)]
        Path(job.run).mkdir(parents=True)
        _, strategy, seed = job.name.split("-")
        (Path(job.run) / "job.json").write_text(json.dumps({"train": {"strategy": strategy, "seed": int(seed[-1])}}))
        (Path(job.run) / "events.jsonl").write_text("".join(f"{json.dumps(event.record())}\n" for event in told))
    cells = [" ".join(line.split()[:6]) for line in call("compare", "lab").stdout.splitlines()[1:3]]
    assert cells == ["bsp 2 65.0 ± 7.1 %", "sgwu 1* 80.0 % 0.0 s"]
    assert call("compare", "1", "3").stdout.splitlines()[0].split() == ["lab-bsp-seed0", "lab-sgwu-seed0"]
    assert call("compare", "lab-bsp-seed0", "3").stdout == call("compare", "1", "3").stdout
    refused = call("compare", "la")
    assert "la: the queue has no job and no sweep of that name; `daskcnn jobs --all` lists all jobs" in refused.output


def test_of_sweeps_of_one_name_the_last_one_of_this_user_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    jobs = [{"user": user, "submitted": at, "run": f"{user}{at}"} for user, at in (("ann", 1), ("ann", 2), ("bob", 3))]
    for job in jobs:
        Path(str(job["run"])).mkdir()
        (Path(str(job["run"])) / "job.json").touch()
    assert runs_of(lambda name, sweep: jobs, ["lab"]) == (["ann2"], True)
    assert runs_of(lambda name, sweep: jobs[2:], ["lab"]) == (["bob3"], True)


def test_a_user_s_name_may_be_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann\udcff")
    assert call("submit").exit_code == 0
    assert json.loads(call("jobs", "--json").stdout)[0]["user"] == "ann?"


def test_jobs_that_are_submitted_beside_the_service_have_its_runs_and_files_of_the_submitter_s(tmp_path: Path) -> None:
    note_runs(tmp_path / "spool", Path("/runs of all"))
    uri = "run.mlflow=sqlite:///{}"
    call("submit", "--name", "a", "--set", uri.format("x/own.db"))
    call("submit", "--name", "b", "--set", uri.format("/own.db"))
    with Spool(tmp_path / "spool") as spool:
        assert [job.run for job in spool.jobs()] == ["/runs of all/a", "/runs of all/b"]
        stores = [spool.content(number)[0]["run"]["mlflow"] for number in (1, 2)]
    assert stores == [f"sqlite:///{tmp_path}/x/own.db", "sqlite:////own.db"]


def test_jobs_go_by_their_names_too() -> None:
    for _ in range(2):  # the last job of a name is meant
        call("submit", "--name", "wide")
        assert call("cancel", "wide").exit_code == 0
    call("submit", "--name", "deep")
    assert call("hold", "deep").stdout == "job 3 (deep): held\n"
    assert call("release", "wide").stdout == "job 2 (wide): queued\n"
    assert (call("logs", "wide").exit_code, call("logs", "wide").stdout) == (0, "")
    refused = call("cancel", "deep", "dep")
    assert (refused.exit_code, refused.stdout) == (2, "")  # none is cancelled
    assert "job dep: the queue has none of that name; `daskcnn jobs --all` lists all jobs" in refused.output


def test_modules_are_sent_with_their_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("own_of_queue.py").write_text("value = 1\n")
    assert call("submit", "--import", "own_of_queue").exit_code == 0
    with Spool(Path("spool")) as spool:
        content, modules = spool.content(1)
    assert (content["run"]["imports"], modules) == (["own_of_queue"], [("own_of_queue.py", "value = 1\n")])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["submit", "--epochs", "0"], 2, "train.epochs"),
        (["submit", "--after", "7"], 2, "job 7: there is none"),
        (["submit", "--after", "9" * 20], 2, "'--after': 99999999999999999999 is not in the range"),
        (["submit", "--priority", "9" * 20], 2, "'--priority': 99999999999999999999 is not in the range"),
        (["cancel", "7"], 2, "error: job 7: there is none; `daskcnn jobs` lists those that there are"),
        (["cancel", "9" * 20], 2, "error: job 99999999999999999999: the queue has none of that name"),
        (["logs", "7"], 2, "error: job 7: there is none"),
        (["jobs", "--spool", "none"], 2, "no spool of `daskcnn serve` is there"),
        (["serve"], 2, "give --scheduler ADDRESS"),
        (["serve", "--scheduler", "here"], 3, "not an address"),
    ],
)
def test_what_is_wrong_is_refused_in_words(words: list[str], code: int, text: str) -> None:
    found = call(*words) if "--spool" not in words else CliRunner().invoke(cli.main, words)
    assert found.exit_code == code
    assert text in found.stderr


def test_a_spool_is_listed_without_dask_or_what_a_job_is_made_of() -> None:
    """They take longer to import than 10,000 jobs to list."""
    code = "import sys; from daskcnn.cli import main; main(standalone_mode=False); print(sorted(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code, "jobs", "--spool", "spool"], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "no jobs in the queue" in found.stdout
    for module in ("distributed", "dask", "zarr", "numba", "pydantic"):
        assert f"'{module}'" not in found.stdout
