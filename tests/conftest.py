"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from daskcnn.arrays import Device
from daskcnn.conv.planner import forget_plans
from daskcnn.conv.timings import memory_of
from tests.standin import DEVICES, device_of
from tests.tiny_runs import tiny_data

_TESTS = count()
# how long an example takes says more of what else the machine does than of us
settings.register_profile("daskcnn", deadline=None)
settings.load_profile("daskcnn")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Processes that tests start keep what they measure here, never in the user's own folder.

    And they measure nothing unless a test asks for it: which algorithm wins must not decide about a last digit.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASKCNN_TUNE", "0")
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("DASKCNN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, _cache_of_the_session: Path) -> Iterator[Path]:
    """A cache folder of the test's own: plans do not depend on what was measured before.

    It is made when it is written to: thousands of tests need none.
    """
    folder = _cache_of_the_session / f"of-test-{next(_TESTS)}"
    monkeypatch.setenv("DASKCNN_CACHE_DIR", str(folder))
    memory_of.cache_clear()
    forget_plans()
    yield folder
    memory_of.cache_clear()
    forget_plans()


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans follow measurements, as outside of tests."""
    monkeypatch.setenv("DASKCNN_TUNE", "1")
    forget_plans()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """A fresh one-threaded device of every backend: NumPy, the strict stand-in for CuPy, and CuPy on a GPU."""
    return device_of(request.param)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a tiny data set that tests only read."""
    return tiny_data(tmp_path_factory.mktemp("data"))
