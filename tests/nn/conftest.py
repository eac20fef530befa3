"""Fixtures of the network's tests."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng():
    """Random numbers that do not depend on which tests ran before."""
    return np.random.default_rng(1)
