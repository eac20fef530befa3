"""Shared fixtures."""

from __future__ import annotations

import pytest
from standin import DEVICES, device_of

from daskcnn.arrays import Device


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """A fresh one-threaded device of every backend: NumPy, the strict stand-in for CuPy, and CuPy on a GPU."""
    return device_of(request.param)
