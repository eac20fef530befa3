"""Temporary folders of processes that were killed are removed by the next, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daskcnn.temporary import OwnFolder, inherit, remove_left

KEEPS = """
import sys
from daskcnn.temporary import OwnFolder
folder = OwnFolder("of-a-run-")
print(folder.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which no other process uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def other_process() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", KEEPS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        yield other, Path(other.stdout.readline().strip())
        other.kill()


def test_a_folder_goes_with_its_context(place: Path) -> None:
    with OwnFolder() as folder:
        assert Path(folder).parent == place
    assert not list(place.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_stays(place: Path) -> None:
    with other_process() as (other, left):
        (left / "data").write_text("of a run")
        with OwnFolder() as folder:
            assert left.is_dir()
        other.kill()
        other.wait()
        assert left.is_dir()
        with OwnFolder() as folder:
            assert sorted(place.iterdir()) == [Path(folder)]


def test_an_heir_keeps_a_folder() -> None:
    with other_process() as (other, left):
        other.kill()
        other.wait()
        inherit(left)
        remove_left()
        assert left.is_dir()


@pytest.mark.parametrize("lock", ["none", "a link"])
def test_what_is_no_folder_of_ours_stays(place: Path, lock: str) -> None:
    """Such as one in which a trained network was kept because its disk was full."""
    other = place / "daskcnn-kept"
    other.mkdir()
    (place / "elsewhere").write_text("")
    if lock == "a link":
        (other / ".in-use").symlink_to(place / "elsewhere")
        (place / "daskcnn-link").symlink_to(other)
    remove_left()
    assert other.is_dir()
    assert (place / "elsewhere").is_file()


def test_where_there_are_no_locks_a_folder_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with OwnFolder() as folder:
        remove_left()
        assert Path(folder).is_dir()


def test_a_file_that_comes_while_a_folder_is_removed_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a task that still writes a chunk when another one of its graph has failed."""
    folder, plain, late = OwnFolder(), os.rmdir, [True]

    def rmdir(path: str, **how: Any) -> None:
        if Path(path).name == Path(folder.name).name and late:
            late.clear()
            (Path(folder.name) / "chunk").write_bytes(b"0")
        plain(path, **how)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with folder:
        pass
    assert not late
    assert not Path(folder.name).exists()
