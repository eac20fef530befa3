from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from daskcnn.errors import DataError
from daskcnn.events import WorkerLost
from daskcnn.runs.log import EventLog, read_events

NOW = datetime(2026, 11, 20, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    append(path, "a", "b")
    return path


def append(path: Path, *events: str) -> None:
    log = EventLog(path)
    for event in events:
        log.append(WorkerLost(worker=event, reason="two\nlines and a γ"), NOW)
    log.close()


def names(path: Path) -> list[str]:
    return [event.worker for event in read_events(path) if isinstance(event, WorkerLost)]


def test_a_line_an_event_however_long_its_message(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [json.loads(line)["worker"] for line in lines] == ["a", "b"]
    assert list(json.loads(lines[0])) == ["event", "at", "worker", "reason"]


def test_a_log_torn_anywhere_in_its_last_line_reads_and_goes_on(path: Path) -> None:
    data = path.read_bytes()
    second = data.index(b"\n") + 1
    for length in range(second, len(data)):
        path.write_bytes(data[:length])
        assert names(path) == ["a"]
        append(path, "c")
        assert names(path) == ["a", "c"]


def test_a_log_torn_in_its_only_line_is_empty_and_goes_on(path: Path) -> None:
    first = path.read_bytes().partition(b"\n")[0]
    for length in range(len(first) + 1):
        path.write_bytes(first[:length])
        assert names(path) == []
        append(path, "c")
        assert names(path) == ["c"]


@pytest.mark.parametrize("tail", [bytes(4096), bytes(20) + b"\n", b"\xff\xfe\n", b"3\n", b"\n"])
def test_garbage_at_the_end_is_cut_off(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)
    assert names(path) == ["a", "b"]
    append(path, "c")
    assert names(path) == ["a", "b", "c"]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b""])
def test_damage_before_the_last_line_is_named_with_its_line(path: Path, line: bytes) -> None:
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, second, b""]))
    with pytest.raises(DataError, match=r"events\.jsonl: line 2 "):
        read_events(path)


def test_a_field_that_is_wrong_is_named_with_its_file_and_line(path: Path) -> None:
    path.write_text(path.read_text().replace('"worker": "b"', '"worker": 3'))
    with pytest.raises(DataError, match=r"events\.jsonl: line 2 \(worker-lost\): worker = 3: .*; remove that line"):
        read_events(path)


def test_an_event_of_a_later_version_is_passed_over(path: Path) -> None:
    path.write_text(path.read_text().replace('"worker-lost"', '"worker-found"', 1))
    assert names(path) == ["b"]
