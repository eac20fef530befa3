"""Shared fixtures."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

from daskcnn.arrays import Device, cpu_count
from daskcnn.compiled.loop import FLOATS, LOOPS, cache_path
from daskcnn.compiled.warm import warm_in_processes
from daskcnn.conv.planner import forget_plans
from daskcnn.conv.timings import memory_of
from tests.standin import DEVICES, device_of
from tests.tiny_runs import tiny_data

_TESTS = count()
# how long an example takes says more of what else the machine does than of us
settings.register_profile("thorough", deadline=None)  # that of `make test-all`
settings.register_profile("every-change", deadline=None, max_examples=30)
settings.load_profile("every-change")


MANY, SHARE = 4, 6
"""A function with more than `MANY` cases has one in `SHARE` of them run at every change."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most cases of functions that have many, with `--hypothesis-profile every-change`."""
    if config.getoption("--hypothesis-profile") != "every-change":
        return
    functions = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left_out = {case for cases in functions.values() if len(cases) > MANY for case in but_a_share(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def but_a_share(cases: Sequence[pytest.Function]) -> Iterator[pytest.Function]:
    """Yield the cases to leave out: the same at each change. One stays with each value of which several cases are."""
    names = cases[0].callspec.indices
    few = [name for name in names if SHARE * len({case.callspec.indices[name] for case in cases}) <= len(cases)]
    seen = set[tuple[str, int]]()
    for case in cases:
        values = {(name, case.callspec.indices[name]) for name in few}
        if values <= seen and crc32(case.nodeid.encode()) % SHARE:
            yield case
        seen |= values


def pytest_report_header() -> str:
    """Say what the tests of every device run on."""
    return f"devices: {', '.join(DEVICES)}" + ("" if "cupy" in DEVICES else " (without CuPy nothing runs on a GPU)")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile all loops, once for all processes of the session and those that tests start."""
    if not hasattr(session.config, "workerinput"):
        for dtype in FLOATS:
            warm_in_processes(dtype, lambda done, of: None, cpu_count())


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Processes that tests start keep what they measure here, never in the user's own folder.

    And they measure nothing unless a test asks for it: which algorithm wins must not decide about a last digit.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(cache_path()))  # what was compiled is right, whatever a test measures
        patch.setenv("DASKCNN_TUNE", "0")
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("DASKCNN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _blas_of_one_thread() -> None:
    """As many tests run at once as there are cores: threads of each one's BLAS would only wait for each other.

    In runs BLAS has one thread too (`single_threaded_blas`).
    """
    import scipy.linalg.cython_blas  # a library that is loaded later would not be limited

    assert scipy.linalg.cython_blas
    threadpool_limits(1, "blas")  # not as a context: inside one no other thread could set the number


@pytest.fixture(scope="session", autouse=True)
def _loops_for_what_they_are_called_with() -> Iterator[None]:
    """No loop was called with other arguments than `warm` compiles it for: a run would stop for seconds meanwhile."""
    yield
    for loop in LOOPS:
        foreseen = {loop.types(dtype) for dtype in FLOATS}
        assert set(loop.function.signatures) <= foreseen, loop.name


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


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of this machine that is taken, and that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
