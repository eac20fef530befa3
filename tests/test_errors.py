"""Errors say value, reason and remedy, as one line and as fields, also when they come from a worker."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from daskcnn.errors import (
    ClusterError,
    DataError,
    Interrupted,
    JobError,
    NotKept,
    PushRefused,
    UserError,
    escaped,
    installing,
    told,
)
from daskcnn.nn.spec import SpecError
from daskcnn.ps import Code
from daskcnn.show.text import clean, plain


def travelled(error: Any) -> Any:
    found: Any = pickle.loads(pickle.dumps(error))  # noqa: S301 # made here
    return found


@pytest.mark.parametrize(
    "error",
    [
        SpecError(["layers[0]: size: 3", "layers[1]: no such layer"]),
        Interrupted.by(2, "; nothing was written"),
        NotKept("the network is in a", Path("a")),
        NotKept("nowhere", None),
    ],
)
def test_errors_with_fields_of_their_own_travel(error: Any) -> None:
    found = travelled(error)
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("kind", [UserError, DataError, ClusterError])
def test_the_three_parts_are_one_line_and_fields_wherever_the_error_goes(kind: type[UserError]) -> None:
    error = kind(Path("a: b"), "is 3; not 4", "make it 4; or 5")
    for found in (error, travelled(error)):
        assert type(found) is kind
        assert str(found) == "a: b: is 3; not 4; make it 4; or 5"
        assert (found.value, found.reason, found.remedy) == ("a: b", "is 3; not 4", "make it 4; or 5")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": "file:///home/ana/dask%20cnn", "dir_info": {"editable": True}}, "-e '/home/ana/dask cnn[plot]'"),
        ({"url": "file:///home/ana/daskcnn", "dir_info": {}}, "'/home/ana/daskcnn[plot]'"),
        ({"url": "file:///tmp/daskcnn.whl", "archive_info": {}}, "'/tmp/daskcnn.whl[plot]'"),
        ({"url": "https://example.org/daskcnn.whl"}, "'daskcnn[plot]'"),
        (None, "'daskcnn[plot]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: dict[str, object] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr("daskcnn.errors.distribution", lambda name: Installed())
    installing.cache_clear()
    try:
        assert installing("plot") == f"pip install {expected}"
    finally:
        installing.cache_clear()


def test_a_message_alone_is_the_reason() -> None:
    for found in (DataError("it is late"), travelled(DataError("it is late"))):
        assert (str(found), found.value, found.reason, found.remedy) == ("it is late", "", "it is late", "")
    assert str(DataError(reason="it is late", remedy="wait")) == "it is late; wait"
    assert DataError("x", OSError("no room"), "tidy up").reason == "no room"


def test_errors_with_a_message_of_their_own_keep_it() -> None:
    error = JobError(["one", "two"])
    assert str(error) == "the job has 2 problems:\n  one\n  two" == str(travelled(error)) == error.reason
    assert Interrupted("stopped", 2).exit_code == 130


def test_parts_that_are_empty_leave_no_separator() -> None:
    assert told("", "it is late", "") == "it is late"
    assert told("w0", "it is late", "") == "w0: it is late"
    assert told("", "it is late", "wait") == "it is late; wait"


@pytest.mark.parametrize("code", Code)
def test_a_refused_push_keeps_its_code_over_the_wire(code: Code) -> None:
    found = pickle.loads(pickle.dumps(PushRefused("w0: payload: holds NaN", code)))  # noqa: S301
    assert (str(found), found.code) == ("w0: payload: holds NaN", code)
    assert isinstance(found.code, Code)


EVIL = "a\x1b[2J\x07\x9b\u202e\u200b\r\x00\udcff b\u3000ö中"


def test_names_from_outside_are_escaped_wherever_they_stand() -> None:
    shown = r"a\x1b[2J\x07\x9b\u202e\u200b\r\x00\udcff b" + "\u3000ö中"
    assert escaped(EVIL) == shown
    error = DataError(EVIL, EVIL, EVIL)
    assert str(error) == f"{shown}: {shown}; {shown}"
    assert (error.value, error.reason, error.remedy) == (shown, shown, shown)
    assert str(DataError(EVIL)) == shown
    assert str(JobError([EVIL])) == f"the job has a problem:\n  {shown}"
    assert clean(EVIL + "\n\tx") == f"{shown}  x"
    assert plain(f"{EVIL}\n{EVIL}") == f"{shown}\n{shown}"


def test_a_line_feed_in_a_name_begins_no_line() -> None:
    assert str(DataError("a\nb", "is 3\nor 4", "mend it")) == "a\\nb: is 3\nor 4; mend it"
    assert str(DataError("two\nlines")) == "two\nlines"


def test_of_very_many_problems_the_first_are_told() -> None:
    error = JobError([f"problem {i}" for i in range(1000)])
    assert len(error.problems) == 1000
    assert str(error).splitlines()[-2:] == ["  problem 49", "  … and 950 more"]
