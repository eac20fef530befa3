from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as encode

from daskcnn.documents import dumps
from daskcnn.errors import DataError
from daskcnn.runs.checkpoint import Checkpoint, best, latest, load, save
from tests.runs.fs_faults import checkpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def quiet(message: str) -> None:
    raise AssertionError(message)


def forge(path: Path, data: bytes | None = None, **changes: Any) -> None:
    """Rewrite a checkpoint with other arrays or other fields, all checksums right."""
    document = json.loads((path / "state.json").read_text())
    if data is not None:
        (path / "arrays.safetensors").write_bytes(data)
        document["arrays"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    document.update(changes)
    del document["sha256"]
    digest = hashlib.sha256(dumps(document, sort_keys=True).encode()).hexdigest()
    (path / "state.json").write_text(json.dumps({**document, "sha256": digest}))


# --- what is saved comes back ---

ARRAYS: dict[str, Callable[[], Any]] = {
    "C order": lambda: np.arange(6.0).reshape(2, 3),
    "Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a strided view": lambda: np.arange(12.0, dtype=np.float32).reshape(3, 4)[:, ::2],
    "reversed": lambda: np.arange(5)[::-1],
    "no dimensions": lambda: np.array(3.5),
    "no elements": lambda: np.zeros((0, 3), np.float32),
    "big-endian": lambda: np.arange(3, dtype=">f4"),
    "half": lambda: np.arange(3, dtype=np.float16),
    "keys": lambda: np.array([2**64 - 1], np.uint64),
    "not finite": lambda: np.array([np.nan, np.inf, -0.0]),
    "broadcast": lambda: np.broadcast_to(np.float32(2), (2, 2)),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_come_back_bit_by_bit_and_writable(tmp_path: Path, kind: str) -> None:
    array = ARRAYS[kind]()
    found = load(save(tmp_path, Checkpoint({"w": array, "other": np.ones(2)}, {}, 1))).arrays["w"]
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.ascontiguousarray(array, found.dtype).tobytes() == found.tobytes()
    assert found.flags.writeable


def test_state_score_and_path_come_back(tmp_path: Path) -> None:
    random_state = np.random.default_rng(3).bit_generator.state
    state = {"rng": random_state, "rate": 0.1, "nested": {"a": [1, None, True]}, "name": "γ\n"}
    path = save(tmp_path / "made" / "on the way", Checkpoint({}, state, 7, 0.25))
    found = load(path)
    assert (found.state, found.step, found.score, found.path) == (state, 7, 0.25, path)
    assert found.arrays == {}


def test_what_json_cannot_hold_is_kept_as_documented(tmp_path: Path) -> None:
    state: dict[Any, Any] = {"loss": np.float32(np.nan), 3: (1, 2)}
    found = load(save(tmp_path, Checkpoint({}, state, 0, float("nan"))))
    assert found.state == {"loss": None, "3": [1, 2]}
    assert found.score is None


def test_nothing_but_safetensors_and_json_is_written(tmp_path: Path) -> None:
    path = save(tmp_path, checkpoint(1))
    assert names(path) == ["arrays.safetensors", "state.json"]
    assert (path / "arrays.safetensors").stat().st_mode == (path / "state.json").stat().st_mode


# --- which ones stay ---


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    for step, score in enumerate([0.1, 0.9, 0.3, 0.4, 0.5, 0.6]):
        save(tmp_path, checkpoint(step, score), keep=2)
    assert names(tmp_path) == ["step-000000001", "step-000000004", "step-000000005"]
    newest, top = latest(tmp_path, warn=quiet), best(tmp_path, warn=quiet)
    assert newest is not None
    assert top is not None
    assert (newest.step, top.step) == (5, 1)


def test_one_that_cannot_be_read_for_a_while_stays(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(10, 0.1), keep=1)
    state = save(tmp_path, checkpoint(20, 0.9), keep=1) / "state.json"
    for step in (30, 40):
        state.rename(tmp_path / "away")  # as a disk that fails for a while
        save(tmp_path, checkpoint(step, 0.5), keep=1)
        (tmp_path / "away").rename(state)
    found = best(tmp_path, warn=quiet)
    assert found is not None
    assert found.step == 20
    assert names(tmp_path) == ["step-000000020", "step-000000040"]
    save(tmp_path, checkpoint(50, 0.5), keep=1)
    assert names(tmp_path) == ["step-000000020", "step-000000050"]


def test_that_the_best_may_be_another_one_is_said(tmp_path: Path) -> None:
    state = save(tmp_path, checkpoint(20, 0.9)) / "state.json"
    save(tmp_path, checkpoint(30, 0.5))
    state.write_bytes(state.read_bytes()[:100])
    warnings: list[str] = []
    found = best(tmp_path, warn=warnings.append)
    assert found is not None
    assert found.step == 30
    (said,) = warnings
    assert said.startswith(f"checkpoint passed over, its score is not known: {state}: ")


def test_the_later_of_equally_good_ones_is_the_best(tmp_path: Path) -> None:
    for step, score in enumerate([0.5, 0.5, 0.1, None]):
        save(tmp_path, checkpoint(step, score), keep=1)
    found = best(tmp_path, warn=quiet)
    assert found is not None
    assert found.step == 1
    assert names(tmp_path) == ["step-000000001", "step-000000003"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9, 999_999_999, 1_000_000_000):
        save(tmp_path, checkpoint(step))
    found = latest(tmp_path, warn=quiet)
    assert found is not None
    assert found.step == 1_000_000_000


def test_going_back_removes_the_steps_gone_back_on(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, checkpoint(step, step / 100))
    save(tmp_path, checkpoint(25))
    assert names(tmp_path) == ["step-000000010", "step-000000020", "step-000000025"]


@pytest.mark.parametrize("times", [2, 3])
def test_the_same_step_again_takes_the_place_of_the_first(tmp_path: Path, times: int) -> None:
    for number in range(times):
        path = save(tmp_path, Checkpoint({}, {"number": number}, 10), keep=1)
        assert [path] == list(tmp_path.iterdir())
        found = latest(tmp_path, warn=quiet)
        assert found is not None
        assert found.state == {"number": number}


def test_of_two_of_the_same_step_the_later_is_the_latest(tmp_path: Path) -> None:
    first = save(tmp_path / "a", Checkpoint({}, {"number": 1}, 10))
    second = save(tmp_path / "a", Checkpoint({}, {"number": 2}, 10))
    second.rename(tmp_path / second.name)  # as if killed ahead of the removal of the first
    save(tmp_path / "b", Checkpoint({}, {"number": 1}, 10)).rename(tmp_path / first.name)
    found = latest(tmp_path, warn=quiet)
    assert found is not None
    assert found.state == {"number": 2}


def test_other_files_and_links_are_left_alone(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", checkpoint(5))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "step-000000001").symlink_to(elsewhere)
    for step in (2, 3):
        save(folder, checkpoint(step), keep=1)
    assert names(folder) == ["notes.txt", "step-000000001", "step-000000003"]
    assert load(elsewhere).step == 5


@pytest.mark.parametrize(("step", "keep", "value"), [(1, 0, "keep=0"), (-1, 1, "step=-1")])
def test_nonsense_is_refused(tmp_path: Path, step: int, keep: int, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        save(tmp_path, checkpoint(step), keep=keep)


@pytest.mark.parametrize("find", [latest, best])
def test_where_there_is_none_none_is_found(tmp_path: Path, find: Callable[..., Checkpoint | None]) -> None:
    assert find(tmp_path / "missing", warn=quiet) is None
    assert find(tmp_path, warn=quiet) is None


# --- damage ---


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_every_truncation_is_refused_by_name(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, checkpoint(1))
    data = (path / file).read_bytes()
    for length in range(len(data)):
        (path / file).write_bytes(data[:length])
        with pytest.raises(DataError, match=file):
            load(path)


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_a_flipped_bit_is_refused_by_name_or_means_the_same(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, checkpoint(1, 1e-9))
    original, data = load(path), (path / file).read_bytes()
    refused = []
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        (path / file).write_bytes(flipped)
        try:
            found = load(path)
        except DataError as error:
            refused.append(str(error))
        else:
            assert (found.state, found.step, found.score) == (original.state, original.step, original.score)
    assert len(refused) >= len(data) - 3  # an E in place of an e
    assert all(file in message for message in refused)


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, checkpoint(1))
    (path / file).unlink()
    with pytest.raises(DataError, match=f"{file}: No such file"):
        load(path)


def test_the_one_before_is_taken_when_the_newest_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = save(tmp_path, checkpoint(step, step / 10))
    (path / "arrays.safetensors").write_bytes(b"")
    for find in (latest, best):
        warnings: list[str] = []
        found = find(tmp_path, warn=warnings.append)
        assert found is not None
        assert found.step == 2
        assert len(warnings) == 1
        assert str(path) in warnings[0]


def test_all_damaged_is_an_error_that_names_one(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, checkpoint(step)) / "state.json").write_text("{")
    warnings: list[str] = []
    with pytest.raises(DataError, match=r"no checkpoint is whole.*step-000000001"):
        latest(tmp_path, warn=warnings.append)
    assert len(warnings) == 2


def test_a_damaged_later_one_does_not_push_out_the_one_just_saved(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(10))
    (save(tmp_path, checkpoint(30)) / "state.json").write_text("")
    save(tmp_path, checkpoint(20), keep=1)
    found = latest(tmp_path, warn=quiet)
    assert found is not None
    assert found.step == 20


# --- hostile files, their checksums right ---


def safetensors(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


HOSTILE = {
    "a pickle": pickle.dumps(print),
    "a huge header": (1 << 60).to_bytes(8, "little") + b"{}",
    "a header longer than allowed": safetensors("{}".ljust(17 << 20), b""),
    "a header that is no JSON": (2).to_bytes(8, "little") + b"[[",
    "nothing": b"",
    "data behind the end": encode({"w": np.ones(2)}) + b"more",
    "a type NumPy does not know": safetensors('{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
    "arrays on top of each other": safetensors(
        '{"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "a shape of more than there is": safetensors(
        '{"w":{"dtype":"U8","shape":[4611686018427387904,4],"data_offsets":[0,4]}}', bytes(4)
    ),
    "a shape of other size": encode({"w": np.ones(2)}).replace(b'"shape":[2]', b'"shape":[9]'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_arrays_are_refused(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, checkpoint(1))
    forge(path, HOSTILE[kind])
    with pytest.raises(DataError, match=r"arrays\.safetensors"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": 2}, "format"),
        ({"step": "1"}, "step"),
        ({"step": -1}, "step"),
        ({"state": []}, "state"),
        ({"arrays": {"bytes": 1}}, r"arrays\.sha256"),
        ({"arrays": {"bytes": 1, "sha256": "", "file": "../../x"}}, r"arrays\.file"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_state_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = save(tmp_path, checkpoint(1))
    forge(path, **changes)
    with pytest.raises(DataError, match=rf"state\.json: not a checkpoint of this version \({problem}"):
        load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"step": NaN}', '{"step": 1e999}', "9" * 5000, "\xff"])
def test_a_state_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = save(tmp_path, checkpoint(1))
    (path / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"state\.json"):
        load(path)


def test_a_huge_state_is_refused_unread(tmp_path: Path) -> None:
    path = save(tmp_path, checkpoint(1))
    with open(path / "state.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no space
    with pytest.raises(DataError, match="1,099,511,627,776 bytes, more than"):
        load(path)
