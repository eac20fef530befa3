"""A pipe, a device or a socket in the place of any file of a run is refused at once: nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from daskcnn.cluster.link.connect import connect
from daskcnn.errors import UserError
from daskcnn.export import read_model
from daskcnn.files import check_regular, open_regular, read_regular
from daskcnn.job.resolve import read_job_file, resolve
from daskcnn.job.tables import Cluster
from daskcnn.reports.report import report
from daskcnn.runs.checkpoint import load
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.log import EventLog, read_events
from daskcnn.sim.cluster import read_cluster
from daskcnn.trained.place import export
from daskcnn.trained.predict import predict
from tests.special_files import SPECIAL, special
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run

kinds = pytest.mark.parametrize("kind", SPECIAL)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    raw = tiny_job(tiny_data(tmp_path))
    return tiny_run(tmp_path, raw, random_state(resolve(raw)), status="done")


def quiet(_: str) -> None:
    return None


READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": lambda run: RunDirectory.open(run).summary(),
    "events.jsonl": lambda run: read_events(run / "events.jsonl"),
    "lock": lambda run: RunDirectory.open(run, writable=True),
    "checkpoints/step-000000007/state.json": lambda run: load(run / "checkpoints/step-000000007"),
    "checkpoints/step-000000007/arrays.safetensors": lambda run: load(run / "checkpoints/step-000000007"),
}


@kinds
@pytest.mark.parametrize("name", READERS)
def test_no_file_of_a_run_is_waited_for(run: Path, kind: str, name: str) -> None:
    special(run / name, kind)
    with pytest.raises(UserError, match=rf"{name}: a {SPECIAL[kind]}, not a regular file; give a regular file"):
        READERS[name](run)


@kinds
def test_a_log_is_not_written_to_what_is_no_file(run: Path, kind: str) -> None:
    special(run / "events.jsonl", kind)
    with pytest.raises(UserError, match="not a regular file"):
        EventLog(run / "events.jsonl")


@kinds
@pytest.mark.parametrize("name", ["job.json", "events.jsonl", "summary.json", "checkpoints"])
def test_commands_on_such_a_run_end_in_words(run: Path, kind: str, name: str) -> None:
    if name == "checkpoints":
        (run / name).rename(run / "away")
    special(run / name, kind)
    with pytest.raises(UserError, match=r".*; .*"):
        predict(str(run), [str(run / "x.png")], checkpoint="last", top=1, say=quiet)
    with pytest.raises(UserError, match=r".*; .*"):
        report(str(run))


@kinds
def test_a_job_file_is_a_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=f"a {SPECIAL[kind]}, not a regular file"):
        read_job_file(special(tmp_path / "job.toml", kind))


@kinds
def test_a_cluster_file_is_a_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=f"a {SPECIAL[kind]}, not a regular file"):
        read_cluster(special(tmp_path / "cluster.toml", kind))


@kinds
def test_a_scheduler_file_is_a_file(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path / "scheduler.json", kind)
    with (
        pytest.raises(UserError, match=f"a {SPECIAL[kind]}, not a regular file"),
        connect(Cluster(scheduler_file=str(path))),
    ):
        pass


def test_cluster_and_scheduler_files_are_bounded(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"[" * ((1 << 20) + 1))
    with pytest.raises(UserError, match="more than the 1,048,576 allowed"):
        read_cluster(large)
    with (
        pytest.raises(UserError, match="more than the 1,048,576 allowed"),
        connect(Cluster(scheduler_file=str(large))),
    ):
        pass
    deep = tmp_path / "deep"
    deep.write_bytes(b"[" * (1 << 20))
    with pytest.raises(UserError, match="not a scheduler's file"), connect(Cluster(scheduler_file=str(deep), wait=0)):
        pass


@pytest.mark.parametrize("kind", ["pipe", "socket"])  # no device: a fault that put a file in its place would be worse
@pytest.mark.parametrize(("to", "name"), [("onnx", "n.onnx"), ("torch", "n.py"), ("safetensors", "n.safetensors")])
def test_no_file_takes_the_place_of_what_is_none(tmp_path: Path, run: Path, kind: str, to: str, name: str) -> None:
    pytest.importorskip("onnx")
    path = special(tmp_path / name, kind)
    before = path.lstat()
    with pytest.raises(UserError, match=f"a {SPECIAL[kind]}, not a regular file; give a file that may be written"):
        export(run, to, out=str(path), checkpoint="last", say=quiet)
    assert path.lstat() == before


def test_the_target_of_a_link_is_written_and_the_link_stays(tmp_path: Path, run: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "model.safetensors", tmp_path / "there" / "kept.safetensors"
    for before in (None, b"old"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        if before:
            target.write_bytes(before)
        assert export(run, "safetensors", out=str(link), checkpoint="last", say=quiet) == (link,)
        assert link.is_symlink()
        assert read_model(target).classes


@kinds
def test_the_helper_refuses_without_opening(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path / "x", kind)
    for function in (check_regular, open_regular, lambda p: read_regular(p, 10)):
        with pytest.raises(UserError, match=f"x: a {SPECIAL[kind]}, not a regular file; give a regular file"):
            function(path)


def test_regular_files_are_read_through_links_and_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "y").symlink_to("x")
    assert check_regular(tmp_path / "y") == 3
    assert read_regular(tmp_path / "y", 3) == b"abc"
    with pytest.raises(UserError, match="x: 3 bytes, more than the 2 allowed; do this"):
        read_regular(tmp_path / "x", 2, remedy="do this")
    with pytest.raises(UserError, match="more than the 10 allowed"):
        read_regular("/proc/self/status", 10)  # it says that it has no bytes
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "z")
