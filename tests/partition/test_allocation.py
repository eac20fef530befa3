"""Ranges of samples and who has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from daskcnn.partition import PARTITIONERS, Allocation
from daskcnn.partition.allocation import take, union


def _some() -> Allocation:
    start = PARTITIONERS["idpa"](increments=2).start(10, ["b", "a"])
    return start.give({"b": 2, "a": 3}, 1).give({"a": 1}, 2)


def test_free_samples_are_given_in_turn() -> None:
    allocation = _some()
    allocation.check()
    assert allocation.ranges == {"b": ((0, 2),), "a": ((2, 6),)}  # neighbours merged
    assert allocation.free == ((6, 10),)
    assert allocation.granted == {"b": 1, "a": 2}
    assert (allocation.given, allocation.size("a"), allocation.sizes()) == (6, 4, {"b": 2, "a": 4})


def test_json_and_back_keeps_the_order_of_workers() -> None:
    record = json.loads(json.dumps(_some().to_dict(), sort_keys=True))
    assert Allocation.from_dict(record) == _some()
    assert Allocation.from_dict(record).workers == ("b", "a")


@pytest.mark.parametrize(
    "change",
    [
        {"total": 11},
        {"free": [[5, 10]]},
        {"free": [[6, 8], [8, 10]]},
        {"free": [[6, 10], [10, 10]]},
        {"free": None},
        {"workers": [{"name": "a"}]},
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allocation: not a valid record"):
        Allocation.from_dict(_some().to_dict() | change)


def test_an_unknown_worker_is_named() -> None:
    with pytest.raises(ValueError, match="worker='z': not among"):
        _some().size("z")


def test_take_and_union_are_inverse() -> None:
    ranges = ((0, 3), (5, 6), (8, 20))
    for number in range(17):
        taken, rest = take(ranges, number)
        assert sum(hi - lo for lo, hi in taken) == number
        assert union(taken, rest) == ranges
    assert union() == union((), ()) == ()
