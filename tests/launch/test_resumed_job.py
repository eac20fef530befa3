"""The job of a run that goes on: new keys of `[cluster]` go with the job that it keeps, and an archive may be gone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from daskcnn.cluster.link.scaled import check_scalable
from daskcnn.errors import JobError
from daskcnn.job.tables import Cluster
from daskcnn.launch.resume import job_to_run
from tests.tiny_runs import tiny_data, tiny_job, tiny_run


def gone_on(folder: Path, path: str, new: dict[str, Any], **kept: dict[str, Any]) -> Cluster:
    """The machines of a run that goes on by these keys of `[cluster]`. kept: of the job that it keeps."""
    run = tiny_run(folder, tiny_job(path, **kept))
    return job_to_run({"cluster": new}, str(run))[0].cluster


@pytest.mark.parametrize(
    ("kept", "new", "words"),
    [
        ({"rule": {"exchange": "asa"}}, {"wire": "int8"}, 'cluster.wire = "int8": replicas that meet peer to peer'),
        ({"train": {"strategy": "easgd"}}, {"wire": "int8"}, "strategy 'easgd' pushes weights to a center"),
        ({"train": {"strategy": "layer"}}, {"ps_shards": 2}, "strategy 'layer' has no server to split"),
        ({"train": {"strategy": "admm"}}, {"workers": "cpu=1"}, "needs at least 2"),
        ({"train": {"reproducible": True}}, {"workers": "cpu=1..2"}, "a range lets these change"),
        ({"cluster": {"workers": "cpu=2"}}, {"only": ["desk-1"]}, "cluster.only names 1"),
    ],
)
def test_a_new_key_that_the_kept_job_contradicts_is_refused_as_in_a_new_job(
    tmp_path: Path, path: str, kept: dict[str, Any], new: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError, match=re.escape(words)) as told:
        gone_on(tmp_path, path, new, **kept)
    assert str(told.value).endswith(f"; the run {tmp_path / 'run'} keeps the rest of its job")


@pytest.mark.parametrize("new", [{"workers": "cpu=3"}, {"scheduler": "tcp://here:1"}, {"scheduler_file": "address"}])
def test_a_run_that_asked_its_cluster_for_workers_does_so_no_more_with_new_ones(
    tmp_path: Path, path: str, new: dict[str, Any]
) -> None:
    adapting = {"cluster": {"workers": "cpu=2..8", "adapt": True}}
    cluster = gone_on(tmp_path, path, new, **adapting)
    assert not cluster.adapt
    check_scalable(cluster, None)
    assert gone_on(tmp_path / "again", path, {"wire": "float16"}, **adapting).adapt
    assert gone_on(tmp_path / "wider", path, {"workers": "cpu=2..9", "adapt": True}, **adapting).adapt


def test_names_of_workers_and_a_file_of_them_replace_each_other(tmp_path: Path, path: str) -> None:
    listed = gone_on(tmp_path, path, {"only_from": "names"}, cluster={"only": ["desk-1"]})
    assert (listed.only, listed.only_from is None) == (None, False)
    named = gone_on(tmp_path / "again", path, {"only": ["desk-2"]}, cluster={"only_from": "names"})
    assert (named.only, named.only_from) == (["desk-2"], None)


@pytest.mark.parametrize("way", ["auto", "path"])
def test_the_command_that_made_the_data_set_from_an_archive_goes_on_with_the_run(
    tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The archive may be gone: the data set is there."""
    asked = tiny_job(tiny_data(tmp_path, name="mnist"), data={"name": "mnist", "archive": str(tmp_path / "gone")})
    asked["run"] = {"dir": str(tmp_path), "name": "run"}
    run = tiny_run(tmp_path, asked)
    longer = asked | {"train": asked["train"] | {"epochs": 20}}
    job, earlier = job_to_run(longer, "auto" if way == "auto" else str(run))
    assert earlier is not None
    assert (job.train.epochs, job.data.archive) == (20, None)
    assert capsys.readouterr().err == ""


def test_a_data_set_that_is_gone_is_made_from_the_archive_that_is_given(tmp_path: Path) -> None:
    asked = tiny_job(tiny_data(tmp_path, name="mnist"), data={"name": "mnist", "archive": str(tmp_path / "old")})
    run = tiny_run(tmp_path, asked)
    Path(asked["data"]["path"]).rename(tmp_path / "elsewhere")
    asked["data"]["archive"] = str(tmp_path / "new")
    assert job_to_run(asked, str(run))[0].data.archive == str(tmp_path / "new")
