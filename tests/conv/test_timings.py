"""What was measured survives processes, crashes and each other's writing; what is not ours is never believed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from platformdirs.macos import MacOS

from daskcnn import files
from daskcnn.arrays import NUMPY
from daskcnn.conv import ConvSpec, timings
from daskcnn.conv.timings import Entry, Memory, key, machine_of, memory_of
from daskcnn.files import cache_folder
from tests.standin import STANDIN

MACHINE = {"device": "a processor", "cores": "2"}
SPEC = ConvSpec(N=8, H=16, W=16, C=8, K=16, R=5, S=5, pad=(2, 2))


def entry(seconds: float = 1.0, version: int = 1) -> Entry:
    return Entry(versions={"a": version}, seconds={"a": (seconds, seconds, seconds)})


def test_plain_problems_keep_the_names_of_times_from_before_groups_and_dilation() -> None:
    plain = "N8 H16 W16 C8 K16 R5 S5 stride 1,1 pad 2,2 float32, 2 threads, 1024 bytes"
    assert key(SPEC, 2, 1100) == plain
    others = [
        replace(SPEC, groups=2),
        replace(SPEC, groups=4),
        replace(SPEC, dilation=(2, 1)),
        replace(SPEC, dilation=(1, 2)),
    ]
    others += [replace(SPEC, pad_end=(1, 0))]
    assert len({key(spec, 2, 1100) for spec in (SPEC, *others)}) == 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "measured.json"


@pytest.fixture
def warnings() -> list[str]:
    return []


def at(path: Path, warnings: list[str], machine: dict[str, str] = MACHINE, **options: Any) -> Memory:
    return Memory(path, machine, warn=warnings.append, **options)


def test_what_one_process_remembers_the_next_one_knows(path: Path, warnings: list[str]) -> None:
    at(path, warnings).remember({"k": entry(0.25)})
    assert at(path, warnings).entries == {"k": entry(0.25)}
    assert not warnings


def test_writers_add_to_what_others_wrote(path: Path, warnings: list[str]) -> None:
    first, second = at(path, warnings), at(path, warnings)
    first.remember({"a": entry(1)})
    second.remember({"b": entry(2)})
    assert second.entries == at(path, warnings).entries == {"a": entry(1), "b": entry(2)}
    assert first.entries == {"a": entry(1)}
    first.refresh()
    assert first.entries == second.entries


def test_of_two_measurements_the_first_is_believed_by_both(path: Path, warnings: list[str]) -> None:
    first, second = at(path, warnings), at(path, warnings)
    first.remember({"k": entry(1)})
    second.remember({"k": entry(2)})
    assert second.entries == at(path, warnings).entries == {"k": entry(1)}


def test_a_new_version_or_measuring_anew_replaces(path: Path, warnings: list[str]) -> None:
    at(path, warnings).remember({"old": entry(1), "again": entry(1)})
    at(path, warnings).remember({"old": entry(2, version=2)})
    at(path, warnings).remember({"again": entry(3)}, anew=True)
    assert at(path, warnings).entries == {"old": entry(2, version=2), "again": entry(3)}


def test_nothing_is_lost_by_many_writers_at_once(path: Path, warnings: list[str]) -> None:
    start = threading.Barrier(8)

    def write(i: int) -> None:
        own = at(path, warnings)
        start.wait()
        for j in range(5):
            own.remember({f"{i}-{j}": entry()})

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at(path, warnings).entries.keys() == {f"{i}-{j}" for i in range(8) for j in range(5)}
    assert not warnings


def test_nothing_is_lost_by_processes_that_write_at_once(path: Path, warnings: list[str]) -> None:
    code = (
        "import sys; from pathlib import Path; from daskcnn.conv.timings import Entry, Memory\n"
        "m = Memory(Path(sys.argv[1]), {'device': 'a processor', 'cores': '2'})\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for j in range(20): m.remember({sys.argv[2] + str(j): Entry(versions={}, seconds={})})\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.communicate("\n")
        assert process.returncode == 0
    assert at(path, warnings).entries.keys() == {f"{name}{j}" for name in "ab" for j in range(20)}


KEPT = {"format": 1, "machine": MACHINE, "entries": {}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00 not text",
        b"[]",
        json.dumps(KEPT)[:-5].encode(),
        json.dumps({**KEPT, "format": 2}).encode(),
        json.dumps({**KEPT, "machine": {"device": "another"}}).encode(),
        json.dumps({**KEPT, "entries": {"k": {"versions": {"a": 1}, "seconds": {"a": [1, 2]}}}}).encode(),
        json.dumps({**KEPT, "entries": {"k": {"versions": {"a": 1}, "seconds": {"a": [1, 2, -3.0]}}}}).encode(),
        json.dumps({**KEPT, "entries": {"k": {"versions": {"a": "1"}, "seconds": {}}}}).encode(),
        b'{"format": 1, "machine": {}, "entries": {"k": {"versions": {}, "seconds": {"a": [1, 1, NaN]}}}}',
    ],
)
def test_a_file_that_is_not_ours_is_ignored_with_one_warning_and_written_anew(
    content: bytes, path: Path, warnings: list[str]
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    found = at(path, warnings)
    assert found.entries == {}
    found.refresh()
    found.remember({"k": entry()})
    (warning,) = warnings
    assert warning.startswith(f"{path}: ignored")
    assert at(path, warnings).entries == {"k": entry()}
    assert len(warnings) == 1


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "file").touch()
    found = at(tmp_path / "file" / "folder" / "measured.json", warnings)
    found.remember({"k": entry(1)})
    found.remember({"l": entry(2)})
    assert found.entries == {"k": entry(1), "l": entry(2)}
    assert len(warnings) == 1


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    failing: str, path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(path, warnings).remember({"k": entry(1)})

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    found = at(path, warnings)
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        found.remember({"l": entry(2)})
    assert found.entries.keys() == {"k", "l"}
    assert "No space left" in warnings[0]
    assert "DASKCNN_CACHE_DIR" in warnings[0]
    assert at(path, warnings).entries == {"k": entry(1)}
    assert {p.suffix for p in path.parent.iterdir()} == {".json", ".lock"}


def test_a_writer_waits_for_the_lock_and_gives_up_in_the_end(path: Path, warnings: list[str]) -> None:
    at(path, warnings).remember({"k": entry(1)})
    with open(path.with_suffix(".lock")) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        at(path, warnings, patience=0.1).remember({"l": entry(2)})
        assert "another process has held" in warnings[0]
        letting_go = threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN))
        letting_go.start()
        at(path, warnings, patience=60.0).remember({"m": entry(3)})
        letting_go.join()
    assert at(path, warnings).entries.keys() == {"k", "m"}


def test_the_key_names_all_that_speed_depends_on() -> None:
    changes: list[dict[str, Any]] = [
        {"N": 9},
        {"H": 17},
        {"W": 17},
        {"C": 9},
        {"K": 17},
        {"R": 4},
        {"S": 4},
        {"stride": (2, 1)},
    ]
    changes += [{"stride": (1, 2)}, {"pad": (1, 2)}, {"pad": (2, 1)}, {"dtype": "float64"}]
    keys = [key(replace(SPEC, **c), 1, 1 << 20) for c in ({}, *changes)]
    keys += [key(SPEC, 2, 1 << 20), key(SPEC, 1, 1 << 21)]
    assert len(set(keys)) == len(keys)
    assert key(SPEC, 1, 1 << 20) == key(SPEC, 1, (1 << 21) - 1)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"DASKCNN_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"DASKCNN_CACHE_DIR": "~/own"}, "/home/one/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/daskcnn"),
        ({}, "/home/one/.cache/daskcnn"),
    ],
)
def test_the_folder_is_the_users(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DASKCNN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/one", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_the_folder_on_other_systems_is_the_one_that_they_have_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DASKCNN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.setattr(files, "user_cache_path", lambda name, **more: MacOS(name, **more).user_cache_path)
    assert cache_folder() == Path("/home/one/Library/Caches/daskcnn")


def test_a_user_without_a_home_has_a_folder_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DASKCNN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"daskcnn-{os.getuid()}"


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for a user whose home cannot be written."""
    monkeypatch.delenv("DASKCNN_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/caches")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"daskcnn-{os.getuid()}"


def test_a_home_that_cannot_be_written_has_a_private_folder_among_the_temporary_files(homeless: Path) -> None:
    assert [cache_folder(), cache_folder()] == [homeless, homeless]
    assert homeless.stat().st_mode & 0o777 == 0o700


def test_a_place_for_caches_that_cannot_be_written_leaves_that_in_the_home(
    homeless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "daskcnn"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["of others", "that others may write", "a link"])
def test_a_temporary_folder_that_may_be_of_others_is_not_used(
    homeless: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of compiled loops are code that runs."""
    if kind == "a link":
        (tmp_path / "other").mkdir()
        homeless.symlink_to(tmp_path / "other")
    else:
        homeless.mkdir(mode=0o700)
    if kind == "that others may write":
        homeless.chmod(0o777)
    if kind == "of others":
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        homeless.rename(homeless.with_name(f"daskcnn-{uid + 1}"))
    assert cache_folder() == Path("/dev/null/caches/daskcnn")


def test_compiled_loops_are_kept_for_a_user_without_a_home(homeless: Path) -> None:
    code = "from daskcnn.compiled import loop; print(loop.UNCACHED, loop.cache_path())"
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    uncached, folder = done.stdout.split()
    assert (uncached, Path(folder).parent) == ("False", homeless / "compiled")


def test_each_machine_has_a_file_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, device = memory_of(NUMPY), memory_of(STANDIN)
    memory_of.cache_clear()
    monkeypatch.setattr(timings, "cpu_count", lambda: 12345)
    elsewhere = memory_of(NUMPY)
    paths = {m.path for m in (here, device, elsewhere)}
    assert len(paths) == 3
    assert {p.parent for p in paths} == {cache}
    assert machine_of(NUMPY)["backend"].startswith("numpy ")
    assert memory_of(NUMPY) is elsewhere
