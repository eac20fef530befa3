"""The problem's shapes, and the problems refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.conv import ConvSpec
from daskcnn.conv.spec import Pair, same_padding

GOOD: dict[str, Any] = {"N": 2, "H": 8, "W": 6, "C": 3, "K": 4, "R": 5, "S": 3}


def test_shapes_and_operations() -> None:
    spec = ConvSpec(**GOOD, stride=(2, 1), pad=(2, 0))
    assert (spec.out_H, spec.out_W) == (4, 4)
    assert spec.x_shape == (8, 6, 2, 3)
    assert spec.w_shape == (5, 3, 3, 4)
    assert spec.y_shape == (4, 4, 2, 4)
    assert spec.flops == 2 * (4 * 4 * 2 * 4) * (5 * 3 * 3)


def test_shapes_and_operations_of_groups_and_dilated_kernels() -> None:
    spec = ConvSpec(**(GOOD | {"C": 6}), pad=(2, 0), dilation=(2, 1), groups=2, pad_end=(1, 0))
    assert (spec.extent, spec.padded) == ((9, 3), (13, 6))
    assert spec.y_shape == (5, 4, 2, 4)
    assert spec.w_shape == (5, 3, 3, 4)
    assert spec.flops == 2 * (5 * 4 * 2 * 4) * (5 * 3 * 3)
    assert (spec.group.C, spec.group.K, spec.group.groups, spec.group.dilation) == (3, 2, 1, (2, 1))
    assert spec.groups * spec.group.flops == spec.flops


@given(
    *(st.tuples(st.integers(1, high), st.integers(1, high)) for high in (20, 6, 4, 4)),
)
def test_padding_to_the_same_size_leaves_as_many_outputs_as_strides_fit(
    size: Pair, taps: Pair, stride: Pair, dilation: Pair
) -> None:
    pad, pad_end = same_padding(size, taps, stride, dilation)
    shape: dict[str, Any] = {"N": 1, "H": size[0], "W": size[1], "C": 1, "K": 1, "R": taps[0], "S": taps[1]}
    spec = ConvSpec(**shape, stride=stride, pad=pad, dilation=dilation, pad_end=pad_end)
    assert (spec.out_H, spec.out_W) == tuple(-(-n // step) for n, step in zip(size, stride, strict=True))
    assert max(pad_end) <= 1
    if stride == (1, 1):
        assert spec.padded == tuple(n + extent - 1 for n, extent in zip(size, spec.extent, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"N": 0}, ["N=0", "1 or more"]),
        ({"K": -3}, ["K=-3", "1 or more"]),
        ({"stride": (1, 0)}, ["stride along W=0", "1 or more"]),
        ({"pad": (-1, 0)}, ["pad along H=-1", "0 or more"]),
        ({"R": 9}, ["kernel of 9 along H", "map is 8", "pad by at least 1"]),
        ({"S": 9, "pad": (0, 1)}, ["kernel of 9 along W", "8 with its padding", "pad by at least 2"]),
        ({"groups": 0}, ["groups=0", "1 or more"]),
        ({"groups": 2}, ["groups=2", "3 input channels", "divides 3"]),
        ({"groups": 3}, ["groups=3", "4 kernels", "divides 4"]),
        ({"C": 12, "K": 8, "groups": 6}, ["groups=6", "8 kernels", "such as 2"]),
        ({"dilation": (1, 0)}, ["dilation along W=0", "1 or more"]),
        ({"pad_end": (-1, 0)}, ["pad_end along H=-1", "0 or more"]),
        ({"dilation": (3, 1)}, ["kernel of 5, 13 with dilation 3, along H", "dilation, or pad by at least 3"]),
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
