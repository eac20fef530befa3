"""The cache of compiled loops with damaged files, on a full disk, without its lock; one loop stands for all."""

from __future__ import annotations

import fcntl
import logging
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from daskcnn.compiled import loop, warm
from daskcnn.compiled.loop import Loop, cache_path


def double(a: Any) -> None:
    for i in range(a.size):
        a[i] *= 2


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache of the test's own, in which this process has found nothing wrong yet."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # Numba reads it again when it compiles
    numba.config.reload_config()
    monkeypatch.setattr(warm, "_import_all", lambda: None)
    for module in loop, warm:
        monkeypatch.setattr(module, "TROUBLES", [])
    return tmp_path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives the loop as another process has it: with nothing in memory."""

    def make() -> Loop:
        loops, troubles = list[Loop](), list[str]()
        for module in loop, warm:
            monkeypatch.setattr(module, "LOOPS", loops)
            monkeypatch.setattr(module, "TROUBLES", troubles)
        monkeypatch.setattr(warm, "_WARM", set())
        loop.loop(lambda T: (T[::1],))(double)
        return loops[0]

    return make


def computes(made: Loop) -> bool:
    a = np.ones(3, np.float32)
    made.function(a)
    return bool((a == 2).all())


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow; empty ones can be made."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_loop_that_a_full_disk_does_not_keep_is_used_and_not_said_to_be_kept(
    fresh: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = fresh()
    with full_disk(), caplog.at_level(logging.WARNING, "daskcnn"):
        assert warm.warm("float32") == 1
        made.compile("float64")
    assert computes(made)
    (line,) = caplog.messages
    assert str(folder) in line
    assert "DASKCNN_CACHE_DIR" in line
    assert not warm.is_ready("float32")
    fresh()
    assert warm.warm("float32") == 1
    assert warm.is_ready("float32")
    fresh()
    with full_disk():
        assert warm.warm("float32") == 0


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_damaged_file_is_written_anew(
    fresh: Any, folder: Path, caplog: pytest.LogCaptureFixture, kind: str, left: float
) -> None:
    assert fresh().compile("float32")
    (file,) = folder.rglob(f"*.{kind}")
    file.write_bytes(file.read_bytes()[: int(left * file.stat().st_size)])
    made = fresh()
    with caplog.at_level(logging.WARNING, "daskcnn"):
        assert made.compile("float32")
    assert computes(made)
    (line,) = caplog.messages
    assert str(file.parent) in line
    assert not fresh().compile("float32")


def test_a_lock_that_another_host_holds_is_waited_for_a_while(
    fresh: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh()
    warm.warm("float32")
    (lock,) = folder.glob("*.lock")
    monkeypatch.setattr(platform, "node", lambda: "another-host")
    monkeypatch.setattr(warm, "PATIENCE", 0.1)
    made = fresh()
    with open(lock, "wb") as held, caplog.at_level(logging.WARNING, "daskcnn"):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert warm.warm("float64") == 1
    assert made.function.signatures
    (line,) = caplog.messages
    assert "held it for 0.1 s" in line
    assert not warm.is_ready("float64")
    fresh()
    warm.warm("float64")
    assert warm.is_ready("float64")


def test_loops_are_compiled_where_no_lock_can_be_made(
    fresh: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = fresh()
    (folder / "compile.lock").mkdir()
    with caplog.at_level(logging.WARNING, "daskcnn"):
        assert warm.warm("float32") == 1
    assert computes(made)
    assert len(caplog.messages) == 1
    assert not warm.is_ready("float32")


def test_unlike_processors_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    here = cache_path()
    monkeypatch.setattr(numba.config, "CPU_NAME", "nehalem")
    assert cache_path() != here
    assert cache_path().parent == here.parent
