"""Fixtures of the compiled loops' laws."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that do not depend on which tests ran before."""
    return np.random.default_rng(1)
