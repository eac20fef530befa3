"""A driver's job and modules: those of its own attempt, whatever the attempt before and the service's folder have."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path

import pytest

from daskcnn.batch.drivers import Drivers
from daskcnn.batch.retries import LONGEST
from daskcnn.job.tables import Cluster
from daskcnn.launch.resume import job_to_run
from tests.batch.fake_queue import FakeQueue
from tests.own_module import NAME, write_module
from tests.tiny_runs import tiny_job, tiny_run


def test_a_job_goes_on_under_the_other_kind_of_list_of_workers(tmp_path: Path, path: str) -> None:
    """The run keeps the keys of the attempt before. A list that is there no more kept it at exit 3 for ever."""
    queue, resumed = FakeQueue(tmp_path), list[Cluster]()
    number = queue.add(workers={}, content=tiny_job(path), name="run")
    for workers in (["desk-1", "desk-2"], ["desk-1", "tcp://2:2"], ["desk-1", "desk-2"]):
        queue.workers = workers
        queue.turn()
        tables = tomllib.loads((queue.drivers.folder(number) / "submitted" / "job.toml").read_text())
        if not resumed:
            tiny_run(queue.folder / "runs", tables)
        job, _ = job_to_run(tables, "auto")
        (Path(queue.job(number).run) / "job.json").write_text(job.model_dump_json())
        resumed.append(job.cluster)
        queue.end(number, 3)
        queue.turn(cluster=False)
        queue.now += LONGEST
    queue.close()
    first, fixed, last = resumed
    assert (first.only, first.workers.named, first.only_from) == (None, {}, str(queue.drivers.list_of(number)))
    assert (fixed.only_from, fixed.workers.named, len(fixed.only or ())) == (None, {"cpu": 2}, 2)
    assert last == first


def test_modules_that_were_sent_come_before_others_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    for folder in (place, elsewhere):
        folder.mkdir()
        write_module(folder, "raise SystemExit('another')")
    write_module(place, "", "only_here")  # as daskcnn lies where the service is run from a checkout
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")]))
    drivers = Drivers(tmp_path / "spool", place=place)
    with drivers.lock(1) as lock:
        sent = (f"{NAME}.py", "import only_here\nraise SystemExit('as sent')")
        drivers.prepare(1, {"run": {"imports": [NAME]}}, [sent])
        drivers.start(1, lock)
    deadline = time.monotonic() + 60
    while drivers.lives(1):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # a driver that has ended shows by its lock alone
    assert f"run.imports = {NAME!r}: it cannot be imported (SystemExit: as sent)" in drivers.last_words(1)
