"""A save that is killed, or that fails, at any of its file-system calls."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from daskcnn.runs.checkpoint import Checkpoint, latest, load, save
from tests.runs.fs_faults import checkpoint, intercepted
from tests.special_files import folder_of_a_user


def fail_on_warning(message: str) -> None:
    raise AssertionError(message)


def assert_whole(found: Checkpoint | None, *steps: int) -> int:
    """It is one of these checkpoints in all of its parts; returns which."""
    assert found is not None
    assert found.step in steps
    expected = checkpoint(found.step)
    assert found.state == expected.state
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    return found.step


@pytest.mark.parametrize("torn", ["whole", "torn"])
def test_a_save_killed_at_any_call_leaves_the_old_or_the_new(tmp_path: Path, torn: str) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save(base, checkpoint(10))
    out.mkdir()
    program = Path(__file__).with_name("fs_faults.py")
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, program, base, out, torn], check=True, env=env, timeout=120)
    folders = sorted(out.iterdir())
    steps = [assert_whole(latest(folder, warn=fail_on_warning), 10, 20) for folder in folders]
    assert steps == sorted(steps), "once the new one is there it stays"
    assert steps.count(10) >= 8, "killed ahead of each write, sync and rename"
    assert steps.count(20) >= 4, "killed in the removal of the old one"
    for folder in folders:
        for path in folder.glob("step-*"):
            assert_whole(load(path), 10, 20)  # a half-removed one would not
        save(folder, checkpoint(30), keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-000000030"], "leftovers are cleaned up"


def _calls(folder: Path) -> list[str]:
    names: list[str] = []
    with intercepted(lambda _, name: names.append(name)):
        save(folder, checkpoint(20), keep=1)
    return names


def test_calls_of_other_threads_are_let_through(tmp_path: Path) -> None:
    done, other = threading.Event(), tmp_path / "other"

    def elsewhere() -> None:
        other.mkdir()
        done.set()

    with intercepted(lambda *_: pytest.fail("not ours")):
        threading.Thread(target=elsewhere).start()
        assert done.wait(60)
    assert other.is_dir()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_save_that_fails_at_any_call_leaves_the_old_or_the_new(tmp_path: Path, code: int) -> None:
    save(tmp_path / "counted", checkpoint(10))
    names = _calls(tmp_path / "counted")
    raised = []
    for k in range(len(names)):
        folder = tmp_path / str(k)
        save(folder, checkpoint(10))

        def fail(call: int, name: str, k: int = k) -> None:
            if call == k and name != "close":
                raise OSError(code, os.strerror(code))

        try:
            with intercepted(fail):
                save(folder, checkpoint(20), keep=1)
        except OSError as error:
            raised.append((k, error.errno))
        step = assert_whole(latest(folder, warn=fail_on_warning), 10, 20)
        assert step == 20 or (k, code) in raised, "a save that does not raise has saved"
        assert step == 20 or not list(folder.glob("tmp-*")), "a failed one gives its space back"
    assert {"mkdir", "open", "fsync", "rename"} <= {names[k] for k, _ in raised}
    assert {number for _, number in raised} == {code}


def test_a_full_disk_raises_oserror_and_the_next_save_succeeds(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    first = save(tmp_path, checkpoint(10))
    big = Checkpoint({"weights": np.ones(100_000)}, {}, 20)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(OSError, match="too large") as caught:
            save(tmp_path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert type(caught.value) is OSError
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert_whole(load(first), 10)
    assert load(save(tmp_path, big)).step == 20


def test_a_read_only_folder_raises_oserror_and_is_still_read() -> None:
    with folder_of_a_user() as folder:
        save(folder, checkpoint(10))
        folder.chmod(0o500)
        try:
            with pytest.raises(PermissionError):
                save(folder, checkpoint(20))
            found = latest(folder, warn=fail_on_warning)
        finally:
            folder.chmod(0o700)
    assert_whole(found, 10)


def test_a_folder_that_cannot_be_made_raises_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "checkpoints", checkpoint(1))
