"""Backends, threads, scratch memory, and random numbers that depend on their keys alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from daskcnn import arrays
from daskcnn.arrays import (
    LINE,
    NUMPY,
    Backend,
    Device,
    Pool,
    Workspace,
    backend,
    cpu_count,
    derive,
    device_profile,
    mix64,
    single_threaded_blas,
    uniform,
)
from daskcnn.errors import ClusterError

# --- backends and devices ---


def test_arrays_cross_the_border_and_back(device: Device) -> None:
    own = device.backend.from_host(np.arange(6.0, dtype="float32").reshape(2, 3))
    back = device.backend.to_host(own + own)
    assert type(back) is np.ndarray
    assert back.dtype == "float32"
    np.testing.assert_array_equal(back, 2 * np.arange(6.0).reshape(2, 3))
    device.backend.synchronize()


def test_a_scalar_is_a_python_number(device: Device) -> None:
    total = device.xp.ones((2, 3), "float32").sum()
    for value in (total, total.reshape(1), 6, 6.0):
        found = device.backend.scalar(value)
        assert type(found) is float
        assert found == 6.0


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ClusterError, match=r"CuPy is not installed.*pip install .*\[gpu\]' there"):
        Device.of("gpu")


def test_a_missing_device_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        @staticmethod
        def getDeviceCount() -> int:
            raise RuntimeError("no CUDA-capable device")

    cupy = type(sys)("cupy")
    cupy.cuda = type(sys)("cuda")  # type: ignore[attr-defined]
    cupy.cuda.runtime = Runtime
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(ClusterError, match=r"no CUDA-capable device.*--resources CPU=1"):
        backend("gpu")


def test_a_cpu_device_has_the_threads_it_was_given() -> None:
    device = Device.of("cpu", threads=3, workspace_limit=1000)
    assert (device.backend, device.xp, device.pool.threads, device.workspace_limit) == (NUMPY, np, 3, 1000)
    device.pool.close()


def test_a_gpu_device_has_one_thread_and_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Backend("fake", type("xp", (), {"empty": staticmethod(np.empty)}), np.asarray, np.asarray, lambda: None)
    monkeypatch.setitem(sys.modules["daskcnn.arrays"].BACKENDS, "gpu", lambda: fake)
    device = Device.of("gpu", threads=8)
    assert device.pool.threads == 1
    assert device.xp is fake.xp
    assert device.workspace.take("a", (2,), "float32").shape == (2,)


def test_a_profile_describes_this_machine() -> None:
    profile = device_profile("cpu", 3)
    assert (profile.kind, profile.threads) == ("cpu", 3)
    assert profile.name
    assert profile.memory > 1 << 20


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs processor affinity")
def test_cores_are_those_the_process_may_use(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert cpu_count(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert cpu_count(tmp_path) == len(mine)


IN_POD, ON_HOST = "0::/", "0::/system.slice/worker.service"
V1 = "3:cpuset:/\n2:cpu,cpuacct:/docker/abc\n0::/"


@pytest.mark.parametrize(
    ("cores", "own", "limits"),
    [
        (2, IN_POD, {"cpu.max": "200000 100000"}),
        (2, IN_POD, {"cpu.max": "150000 100000"}),
        (1, IN_POD, {"cpu.max": "5000 100000"}),
        (64, IN_POD, {"cpu.max": "max 100000"}),
        (64, IN_POD, {"cpu.max": "9900000 100000"}),
        (64, IN_POD, {}),
        (3, ON_HOST, {"system.slice/worker.service/cpu.max": "300000 100000", "system.slice/cpu.max": "max 100000"}),
        (3, ON_HOST, {"system.slice/worker.service/cpu.max": "max 100000", "system.slice/cpu.max": "300000 100000"}),
        (4, V1, {"cpu/docker/abc/cpu.cfs_quota_us": "400000", "cpu/docker/abc/cpu.cfs_period_us": "100000"}),
        (4, V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}),  # as a container sees it
        (64, V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_cores_are_no_more_than_control_groups_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, own: str, limits: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    for name, text in {"proc/self/cgroup": own, **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
    assert cpu_count(tmp_path) == cores


def test_blas_runs_one_thread_inside_and_as_many_as_before_outside() -> None:
    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    with single_threaded_blas():
        pass  # SciPy's library is loaded when it is first needed
    with threadpool_limits(2, "blas"):
        assert set(threads()) == {2}
        with single_threaded_blas(), single_threaded_blas():
            assert set(threads()) == {1}
        assert set(threads()) == {2}


# --- threads ---


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(request.param)
    yield pool
    pool.close()


def test_results_come_in_order(pool: Pool) -> None:
    assert pool.map(lambda i: i * i, range(20)) == [i * i for i in range(20)]


def test_the_first_exception_is_raised(pool: Pool) -> None:
    def fail(i: int) -> None:
        if i >= 2:
            raise KeyError(i)

    with pytest.raises(KeyError, match="2"):
        pool.map(fail, range(5))


def test_work_sees_the_caller_s_error_state(pool: Pool) -> None:
    with np.errstate(over="raise"):
        assert pool.map(lambda _: np.geterr()["over"], range(4)) == ["raise"] * 4


def test_one_thread_works_inline_and_several_side_by_side() -> None:
    assert Pool(1).map(lambda _: threading.current_thread(), [0]) == [threading.current_thread()]
    pool, meeting = Pool(3), threading.Barrier(3, timeout=60)
    pool.map(lambda _: meeting.wait(), range(3))  # nobody gets past the barrier alone
    pool.close()


def test_closing_ends_the_threads() -> None:
    pool, together = Pool(2), threading.Barrier(2, timeout=60)

    def met() -> threading.Thread:
        together.wait()
        return threading.current_thread()

    (helper,) = set(pool.map(lambda _: met(), range(2))) - {threading.current_thread()}
    pool.close()
    assert not helper.is_alive()
    Pool(1).close()


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match=r"threads=0.*train\.threads"):
        Pool(0)


@given(size=st.integers(0, 200), threads=st.integers(1, 9), at_least=st.integers(1, 60))
def test_slices_cut_a_range(size: int, threads: int, at_least: int) -> None:
    pool = Pool(threads)  # starts no thread before it has work
    slices = pool.slices(size, at_least=at_least)
    lengths = [s.stop - s.start for s in slices]
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(size))
    assert 1 <= len(slices) <= threads
    assert max(lengths) - min(lengths) <= 1
    assert len(slices) == 1 or min(lengths) >= at_least


# --- scratch memory ---


def test_scratch_memory_is_reused_while_it_is_large_enough(device: Device) -> None:
    scratch = device.workspace
    first = scratch.take("a", (4, 5), "float32")
    assert (first.shape, first.dtype) == ((4, 5), np.dtype("float32"))
    first[...] = 7
    assert device.backend.scalar(scratch.take("a", (3,), "float32").sum()) == 21
    assert scratch.nbytes == 80
    assert scratch.take("a", (5, 5), np.float32).shape == (5, 5)
    assert scratch.nbytes == 100  # replaced, not added


def test_scratch_memory_is_apart_by_name_and_dtype() -> None:
    scratch = Workspace()
    kept = [scratch.take("a", (4,), "float32"), scratch.take("b", (4,), "float32"), scratch.take("a", (4,), "float64")]
    assert scratch.nbytes == 16 + 16 + 32
    for i, one in enumerate(kept):
        assert not any(np.shares_memory(one, other) for other in kept[i + 1 :])
    assert scratch.take("c", (), "float32").shape == ()


def test_a_pass_takes_the_memory_of_the_one_before(device: Device) -> None:
    scratch = device.workspace
    for _ in range(3):
        scratch.recycle()
        one, other = scratch.take("a", (100,), "float32"), scratch.take("b", (10,), "float64")
        one[...], other[...] = 1, 2
        assert device.backend.scalar(one.sum()) == 100  # they do not share memory within a pass
    held = scratch.nbytes
    assert 480 <= held <= 480 + 3 * LINE
    scratch.recycle()
    scratch.take("of another pass", (120,), "float32")
    assert scratch.nbytes == held
    scratch.recycle(1000)
    scratch.take("foreseen", (250,), "float32")
    assert scratch.nbytes == 1000


def test_scratch_memory_begins_at_a_cache_line_on_the_slab_and_beside_it() -> None:
    scratch = Workspace()
    for sizes in ((3, 7, 1), (3, 7, 1), (3, 1000, 7, 500)):  # all beside the slab, all on it, some of either
        scratch.recycle()
        for i, size in enumerate(sizes):
            assert scratch.take(str(i), (size,), "float32").ctypes.data % LINE == 0


def test_freed_memory_is_kept_until_all_who_asked_for_it_release_it() -> None:
    program = (
        "import numpy as np, psutil; from daskcnn.arrays import keep_freed_memory, release_freed_memory\n"
        "resident = lambda: psutil.Process().memory_info().rss\n"
        "keep_freed_memory(); keep_freed_memory(); release_freed_memory()\n"
        "before = resident(); a = np.ones(1 << 26, 'uint8'); del a; kept = resident()\n"
        "release_freed_memory(); print(kept - before > 1 << 25, resident() - before < 1 << 25)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found == ("True True\n" if platform.libc_ver()[0] == "glibc" else found)


# --- random numbers ---

keys = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20, unique=True).map(lambda k: np.array(k, np.uint64))


def test_mixing_is_splitmix64() -> None:
    """The first numbers of SplitMix64 from seed 1234567: the finalizer of multiples of the golden ratio."""
    state = np.array([(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in (1, 2, 3)], np.uint64)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert mix64(np, state).tolist() == expected
    seed = np.array([1234567], np.uint64)
    assert [derive(np, seed, salt).tolist() for salt in (0, 1)] == [[expected[0]], [expected[2]]]


@given(keys, st.integers(0, 2**63))
def test_a_derived_key_depends_on_its_own_key_alone(keys: np.ndarray, salt: int) -> None:
    derived = derive(np, keys, salt)
    assert derived.dtype == np.uint64
    assert len(set(derived.tolist())) == len(keys)  # a bijection
    np.testing.assert_array_equal(derive(np, keys[::-1], salt), derived[::-1])
    assert not (derived == derive(np, keys, salt + 1)).any()


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    a, b = (uniform(np, derive(np, keys, salt)).astype("float64") for salt in (1, 2))
    for values in (a, b):
        assert np.histogram(values, 10, (0, 1))[0] == pytest.approx(np.full(10, 10_000), abs=500)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02


def test_uniform_numbers_stay_below_one() -> None:
    found = uniform(np, np.array([0, 2**64 - 1], np.uint64))
    assert found.dtype == np.float32
    assert found.tolist() == [0.0, 1 - 2.0**-24]


def test_random_numbers_are_the_same_on_every_device(device: Device) -> None:
    keys = np.arange(1000, dtype=np.uint64)
    own = uniform(device.xp, derive(device.xp, device.backend.from_host(keys), 5))
    np.testing.assert_array_equal(device.backend.to_host(own), uniform(np, derive(np, keys, 5)))


def test_kept_memory_may_be_released_while_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finalizer of an object that garbage collection finds runs in whatever the thread is just doing."""
    monkeypatch.setattr(arrays, "_set_malloc", lambda *_: None)
    monkeypatch.setattr(arrays, "_FREED", arrays._Setting(arrays.release_freed_memory, lambda: None))
    asking = threading.Thread(target=arrays.keep_freed_memory, daemon=True)
    asking.start()
    asking.join(timeout=10)
    assert not asking.is_alive()
