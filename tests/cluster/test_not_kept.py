"""A job whose run directory goes while it trains, started as a user would: exit 6, and the network is elsewhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from daskcnn.runs.directory import RunDirectory
from tests.cluster.by_hand import DASK, daskcnn_run, finish, job_file, process, wait_for_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_trained_but_not_kept_where_asked_is_exit_6_and_the_place_is_named(tmp_path: Path, synthetic: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job = job_file(tmp_path, synthetic, train={"epochs": 60}, run={"name": "it"}, cluster={"workers": {"cpu": 1}})
    with process(*daskcnn_run(job), env={**os.environ, "TMPDIR": str(elsewhere)}) as run:
        wait_for_checkpoint(tmp_path / "runs/it", run)
        os.rename(tmp_path / "runs", tmp_path / "removed")
        (tmp_path / "runs").write_text("a file stands where the runs were")
        shutil.rmtree(tmp_path / "removed")
        _, told = run.communicate(timeout=100)
    assert run.returncode == 6, told
    (place,) = elsewhere.glob("daskcnn-*/it")
    assert f"the whole run is in {place}" in told
    assert "Traceback" not in told
    kept = RunDirectory.open(place)
    summary = kept.summary()
    assert summary is not None
    assert (summary["status"], summary["epochs"]) == ("done", 60)
    kinds = [event.kind for event in kept.events()]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    evaluated = finish([*DASK, "cnn", "evaluate", str(place)])
    assert evaluated.returncode == 0, evaluated.stderr
    assert "accuracy" in evaluated.stdout
