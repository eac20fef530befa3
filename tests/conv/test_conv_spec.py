"""The problem's shapes, and the problems refused."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.conv import ConvSpec

GOOD: dict[str, Any] = {"N": 2, "H": 8, "W": 6, "C": 3, "K": 4, "R": 5, "S": 3}


def test_shapes_and_operations() -> None:
    spec = ConvSpec(**GOOD, stride=(2, 1), pad=(2, 0))
    assert (spec.out_H, spec.out_W) == (4, 4)
    assert spec.x_shape == (8, 6, 2, 3)
    assert spec.w_shape == (5, 3, 3, 4)
    assert spec.y_shape == (4, 4, 2, 4)
    assert spec.flops == 2 * (4 * 4 * 2 * 4) * (5 * 3 * 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"N": 0}, ["N=0", "1 or more"]),
        ({"K": -3}, ["K=-3", "1 or more"]),
        ({"stride": (1, 0)}, ["stride along W=0", "1 or more"]),
        ({"pad": (-1, 0)}, ["pad along H=-1", "0 or more"]),
        ({"R": 9}, ["kernel of 9 along H", "map is 8", "pad by at least 1"]),
        ({"S": 9, "pad": (0, 1)}, ["kernel of 9 along W", "8 with its padding", "pad by at least 2"]),
        ({"dtype": "int32"}, ["dtype=int32", "float32 or float64"]),
    ],
)
def test_refuses_nonsense_with_value_and_remedy(change: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        ConvSpec(**(GOOD | change))
    for words in said:
        assert words in str(error.value)


def test_the_padding_it_advises_is_accepted_and_less_is_not() -> None:
    ConvSpec(**(GOOD | {"S": 9, "pad": (0, 2)}))
    with pytest.raises(ValueError, match="kernel of 9"):
        ConvSpec(**(GOOD | {"S": 9, "pad": (0, 1)}))
