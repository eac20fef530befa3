"""Fixtures of the convolutions' tests."""

from __future__ import annotations

import pytest

from daskcnn.conv import ALGORITHMS, depthwise, direct, im2col, spectral
from daskcnn.conv.planner import forget_plans
from tests.conv.fake_algorithm import FakeAlgorithm, Only


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Only:
    """Let these algorithms be all there are."""

    def replace_all(*fakes: FakeAlgorithm) -> None:
        for name in list(ALGORITHMS):
            monkeypatch.delitem(ALGORITHMS, name)
        for fake in fakes:
            monkeypatch.setitem(ALGORITHMS, fake.name, fake)
        forget_plans()

    return replace_all


@pytest.fixture
def eager_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share the smallest problem, which is not worth waking them otherwise."""
    monkeypatch.setattr(im2col, "THREAD_FLOPS", 1)
    monkeypatch.setattr(depthwise, "THREAD_FLOPS", 1)
    monkeypatch.setattr(direct, "THREAD_FLOPS", 1)
    monkeypatch.setattr(spectral, "TASK_FLOPS", 1)
