"""A job's network without its weights."""

from __future__ import annotations

import pytest

from daskcnn.job.network import initial_weights, layout_of
from daskcnn.job.resolve import resolve
from tests.export.networks import facts


@pytest.mark.parametrize("name", ["quick", "resnet20"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_layout_is_that_of_weights_that_are_drawn(name: str, dtype: str) -> None:
    job, images = resolve({"model": {"name": name, "dtype": dtype}}), facts((32, 32, 3))
    assert layout_of(job, images) == initial_weights(job, images)[0]
