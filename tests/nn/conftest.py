"""Fixtures of the network's tests."""

from __future__ import annotations

import numpy as np
import pytest

from daskcnn.compiled import program
from daskcnn.nn import local


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that do not depend on which tests ran before."""
    return np.random.default_rng(1)


@pytest.fixture(autouse=True)
def eager_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share the smallest pass, which is not worth waking them otherwise."""
    monkeypatch.setattr(local, "THREAD_PARTS", 1)
    monkeypatch.setattr(program, "LEAST_PART", 1)
