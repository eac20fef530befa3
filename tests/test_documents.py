"""JSON from outside is bounded before it is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.documents import BOUNDS, Bounds, parse_json, read_json, unknown_keys
from daskcnn.errors import DataError

SMALL = Bounds(size=100, values=10, tables=3)

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(JSON, st.sampled_from([None, 2]))
def test_what_is_within_the_bounds_is_read(value: Any, indent: int | None) -> None:
    assert parse_json(json.dumps(value, indent=indent).encode(), "x", remedy="mend it") == value


def count(value: Any) -> tuple[int, int]:
    """Keys and values, and tables among them."""
    if not isinstance(value, dict | list):
        return 1, 0
    inner = [count(v) for v in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + keys + sum(n for n, _ in inner), 1 + sum(t for _, t in inner)


@given(JSON, st.integers(1, 8), st.integers(1, 8))
def test_nothing_above_the_bounds_is_parsed(value: Any, values: int, tables: int) -> None:
    found, of_tables = count(value)
    if found > 2 * values + tables or of_tables > tables:
        with pytest.raises(DataError, match="more than the"):
            parse_json(json.dumps(value).encode(), "x", remedy="mend it", bounds=Bounds(10**6, values, tables))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" " * 101, "x: 101 bytes, more than the 100 allowed; mend it"),
        ("[[],[],[]]", "x: 4 lists and tables, more than the 3 allowed; mend it"),
        ("[1,2,3,4,5,6,7,8,9,10]", "x: 11 values, more than the 10 allowed; mend it"),
        ('{"a":1,"b":2,"c":3,"d":4,"e":5}', "x: 11 values, more than the 10 allowed; mend it"),
        ("[", r"x: not JSON \(Expecting value: .*\); mend it"),
        ("\xff", r"x: not JSON .*; mend it"),
    ],
)
def test_a_refusal_names_what_is_too_much(text: str, words: str) -> None:
    with pytest.raises(DataError, match=f"^{words}$"):
        parse_json(text.encode("latin1"), "x", remedy="mend it", bounds=SMALL)


@pytest.mark.parametrize("rare", ["😀", "\\ud83d\\ude00"])
def test_a_rare_character_does_not_widen_a_long_text(rare: str) -> None:
    long, short = '"a",' * 10, "a" * (8 << 20)
    with pytest.raises(DataError, match="characters that take four bytes each, at most 8,388,608 allowed"):
        parse_json(f'[{long}"{short}{rare}"]'.encode(), "x", remedy="mend it")
    assert parse_json(f'["{rare}","{short[:1000]}"]'.encode(), "x", remedy="mend it")[1] == "a" * 1000


def test_a_large_document_of_short_strings_may_have_any_characters() -> None:
    names = ["\u4e2d" + "a" * 60] * 130_000
    text = json.dumps(names).encode()
    assert len(text) > 8 << 20
    assert parse_json(text, "x", remedy="mend it") == names


def test_a_file_is_read_within_its_bounds(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("[1]")
    assert read_json(file, remedy="mend it") == [1]
    with open(file, "wb") as out:
        out.truncate(BOUNDS.size + 1)
    with pytest.raises(DataError, match="67,108,865 bytes, more than the 67,108,864 allowed; mend it"):
        read_json(file, remedy="mend it")
    with pytest.raises(DataError, match="No such file or directory; mend it"):
        read_json(tmp_path / "y.json", remedy="mend it")


def test_the_first_unknown_key_is_found() -> None:
    assert unknown_keys({"a": 1, "c": 2, "d": 3}, {"a": None, "b": None}) == "c"
    assert unknown_keys({"a": 1}, {"a": None}) is None
