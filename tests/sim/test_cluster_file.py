"""Cluster files: what they may say, what is refused, and that they can be written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.sim.cluster import (
    ClusterFileError,
    SimulatedCluster,
    Unequal,
    Worker,
    kinds,
    parse_cluster,
    read_cluster,
    to_toml,
)

DESK = {"name": "desk", "images_per_second": 100}


def refused(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(raw)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"images_per_second": 0},
            "worker[0].images_per_second = 0: input should be greater than or equal to 0.001; give the i",
        ),
        ({"images_per_second": -3.0}, "worker[0].images_per_second = -3.0: input should be greater than or equal to 0"),
        ({"images_per_second": float("inf")}, "worker[0].images_per_second = inf: input should be a finite number; "),
        ({"images_per_second": "fast"}, "worker[0].images_per_second = 'fast': input should be a valid number; give"),
        (
            {"bandwidth": 0},
            "worker[0].bandwidth = 0: input should be greater than or equal to 0.001; give bytes a secon",
        ),
        (
            {"bandwidth": -5},
            "worker[0].bandwidth = -5: input should be greater than or equal to 0.001; give bytes a seco",
        ),
        ({"latency": -1.0}, "worker[0].latency = -1.0: input should be greater than or equal to 0; give seconds"),
        ({"count": -1}, "worker[0].count = -1: input should be greater than or equal to 0; give 1 to 1,048,576, or 0"),
        ({"kind": "tpu"}, "worker[0].kind = 'tpu': input should be 'cpu' or 'gpu'; give "),
        ({"threds": 2}, "worker[0].threds: unknown key; did you mean 'threads'?"),
        ({"name": "a b"}, "worker[0].name = 'a b': string should match pattern"),
        ({"speed": {"kind": "stall", "seconds": 0, "every": 1.0}}, "worker[0].speed.seconds = 0: input should be gr"),
        ({"speed": {"kind": "stall", "seconds": 1.0}}, "worker[0].speed = {'kind': 'stall', 'seconds': 1.0}: give eit"),
        ({"speed": {"kind": "drift", "to": -1.0, "seconds": 1.0}}, "worker[0].speed.to = -1.0: input should be great"),
        ({"speed": {"kind": "walk", "every": 1.0, "sprd": 1.0}}, "worker[0].speed.sprd: unknown key; did you mean 's"),
        (
            {"unequal": {"lowest": 0, "highest": 1}},
            "worker[0].unequal.lowest = 0: input should be greater than or equal to 0.001; give",
        ),
        ({"images_per_second": 1e-320}, "worker[0].images_per_second = 1e-320: input should be greater than or equal"),
        ({"conv_seconds": {"conv1": 0.0}}, "worker[0].conv_seconds.conv1 = 0.0: input should be greater than or equal"),
        ({"conv_fixed": {"conv1": -1.0}}, "worker[0].conv_fixed.conv1 = -1.0: input should be greater than or equal"),
        (
            {"conv_seconds": {"conv1": 1.0}, "conv_fixed": {"conv1": 1.0}},
            "worker 'desk': conv_fixed.conv1 = 1: conv_seconds of all its kernels are 1; give less",
        ),
        (
            {"speed": {"kind": "walk", "every": 1e-9, "spread": 0.1}},
            "worker[0].speed.every = 1e-09: input should be gr",
        ),
        (
            {"speed": {"kind": "walk", "every": 1.0, "spread": 1e6}},
            "worker[0].speed.spread = 1000000.0: input should b",
        ),
        (
            {"speed": {"kind": "stall", "every": 1e-9, "seconds": 1}},
            "worker[0].speed.every = 1e-09: input should be gr",
        ),
        ({"unequal": {"lowest": 2, "highest": 1}}, "worker 'desk': unequal.lowest = 2: above highest, 1; exchange th"),
        ({"unequal": {"lowst": 2}}, "worker[0].unequal.lowst: unknown key; did you mean 'lowest'?"),
        ({"speed": {"kind": "fast"}}, "worker[0].speed = {'kind': 'fast'}: input tag 'fast' found using 'kind'"),
    ],
)
def test_a_wrong_worker_is_refused_with_value_reason_and_remedy(change: dict[str, Any], problem: str) -> None:
    assert any(found.startswith(problem) for found in refused({"worker": [{**DESK, **change}]}))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "worker: is missing; give at least one [[worker]] with a name and images_per_second"),
        ({"worker": []}, "worker = []: list should have at least 1 item"),
        ({"worker": [{"images_per_second": 1}]}, "worker[0].name: is missing; give it a name of letters"),
        ({"worker": [{"name": "a"}]}, "worker[0].images_per_second: is missing; give the images that it trains on"),
        ({"worker": [{**DESK, "count": 0}]}, "worker.count = 0: a cluster needs at least one worker; raise a count"),
        ({"worker": [DESK, DESK]}, "worker.name = 'desk': 2 workers have it; give each its own, or one of them a coun"),
        ({"worker": [{**DESK, "count": 3}, {**DESK, "name": "desk-1"}]}, "worker.name = 'desk-1': 2 workers have it; "),
        ({"worker": [DESK], "server": {"bandwidth": 0}}, "server.bandwidth = 0: input should be greater than or equal"),
        (
            {"worker": [DESK], "server": {"merge_rate": -1}},
            "server.merge_rate = -1: input should be greater than or eq",
        ),
        ({"worker": [DESK], "costs": {"dispatch": -1}}, "costs.dispatch = -1: input should be greater than or equal "),
        ({"worker": [DESK], "servr": {}}, "servr: unknown section; did you mean 'server'?"),
    ],
)
def test_a_wrong_cluster_is_refused_with_value_reason_and_remedy(raw: dict[str, Any], problem: str) -> None:
    assert any(found.startswith(problem) for found in refused(raw))


def test_all_problems_come_at_once() -> None:
    raw = {"server": {"bandwidth": 0}, "worker": [{**DESK, "latency": -1}, {**DESK, "color": "red"}]}
    assert len(refused(raw)) == 4


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "No such file or directory; give the path"), ("[[worker", "not a TOML file")]
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterFileError, match=problem):
        read_cluster(path)


def test_the_error_survives_a_process() -> None:
    error = pickle.loads(pickle.dumps(ClusterFileError(["a", "b"])))  # noqa: S301
    assert error.problems == ("a", "b")
    assert str(error) == "the cluster file has 2 problems:\n  a\n  b"


def test_the_example_is_a_cluster() -> None:
    example = read_cluster(Path(__file__).parents[2] / "deploy" / "cluster-example.toml")
    assert [member.name for member in example.members()] == ["desk-1", "desk-2", "desk-3", "desk-4", "laptop"]
    assert kinds(example).keys() == {"cpu", "gpu"}


SPEEDS: list[dict[str, Any]] = [
    {"kind": "constant"},
    {"kind": "drift", "to": 0.5, "seconds": 3.0},
    {"kind": "walk", "every": 1.0, "spread": 0.5},
    {"kind": "stall", "seconds": 1.0, "at": [2.0, 5.0]},
    {"kind": "stall", "seconds": 1.0, "every": 9.0},
]
positive = st.floats(1e-3, 1e6)
workers = st.fixed_dictionaries(
    {"images_per_second": positive},
    optional={
        "count": st.integers(1, 4),
        "kind": st.sampled_from(["cpu", "gpu"]),
        "bandwidth": positive,
        "latency": st.floats(0, 1),
        "conv_seconds": st.dictionaries(st.sampled_from(["conv1", "a/b", 'say "x"']), positive),
        "rest_seconds": st.floats(0, 1),
        "speed": st.sampled_from(SPEEDS),
        "unequal": st.just({"lowest": 0.5, "highest": 2.0, "seed": 3}),
    },
)


@given(st.lists(workers, min_size=1, max_size=4), st.fixed_dictionaries({}, optional={"merge_rate": positive}))
def test_a_cluster_can_be_written_and_read(tables: list[dict[str, Any]], server: dict[str, Any]) -> None:
    import tomllib

    named = [{"name": f"w{i}", **table} for i, table in enumerate(tables)]
    found = parse_cluster({"worker": named, "server": server})
    assert parse_cluster(tomllib.loads(to_toml(found))) == found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any), st.integers(1, 20))
def test_of_any_size_every_worker_has_a_name_of_its_own(counts: list[int], size: int) -> None:
    found = parse_cluster({"worker": [{**DESK, "name": f"w{i}", "count": n} for i, n in enumerate(counts)]})
    names = [member.name for member in found.of_size(size).members()]
    assert len(names) == len(set(names)) == size
    own = [member.name for member in found.members()]
    assert names[: len(own)] == own[:size]


def test_one_more_worker_is_like_its_pattern() -> None:
    cluster = SimulatedCluster(
        worker=[Worker(name="a", images_per_second=5, count=2), Worker(name="g", images_per_second=50)]
    )
    for _ in range(3):
        cluster = cluster.with_one_more(cluster.worker[1])
    assert [member.name for member in cluster.members()] == ["a-1", "a-2", "g", "g+1", "g+2", "g+3"]
    assert [member.images_per_second for member in cluster.members()][2:] == [50] * 4


@given(st.floats(0.1, 5), st.floats(1, 4), st.integers(1, 12), st.integers(0, 9))
def test_unequal_workers_are_between_the_ends_and_stay_when_there_are_more(
    lowest: float, wide: float, count: int, seed: int
) -> None:
    unequal = Unequal(lowest=lowest, highest=lowest * wide, seed=seed)
    speeds = [w.images_per_second for w in Worker(name="a", images_per_second=1, count=count, unequal=unequal).each()]
    assert all(lowest * (1 - 1e-9) <= speed <= lowest * wide * (1 + 1e-9) for speed in speeds)
    more = Worker(name="a", images_per_second=1, count=count + 3, unequal=unequal).each()
    assert [w.images_per_second for w in more][:count] == speeds
    assert len({w.images_per_second for w in more}) > 1 or wide < 1.01


def test_unequal_speeds_are_those_of_a_gaussian() -> None:
    many = Worker(name="a", images_per_second=100, count=4000, unequal=Unequal(lowest=0.5, highest=2.0)).each()
    speeds = np.array([worker.images_per_second for worker in many])
    assert speeds.mean() == pytest.approx(125, rel=0.02)
    assert speeds.std() == pytest.approx(25, rel=0.05)


def test_all_that_a_worker_computes_takes_as_many_times_fewer_seconds() -> None:
    worker = Worker(
        name="a",
        images_per_second=10,
        step_fixed=0.2,
        conv_seconds={"c": 0.06},
        conv_fixed={"c": 0.01},
        rest_seconds=0.04,
    )
    twice = worker.times_as_fast(2)
    assert twice.step(8) == pytest.approx(worker.step(8) / 2)
    assert (twice.conv_seconds, twice.conv_fixed, twice.rest_seconds) == ({"c": 0.03}, {"c": 0.005}, 0.02)


def test_threads_help_as_far_as_the_work_is_not_serial() -> None:
    worker = Worker(name="a", images_per_second=100, serial=0.25, evaluations_per_second=300)
    four = worker.with_threads(4)
    assert four.images_per_second == pytest.approx(100 / (0.25 + 0.75 / 4))
    assert four.evaluations_per_second == pytest.approx(300 / (0.25 + 0.75 / 4))
    assert four.with_threads(1).images_per_second == pytest.approx(100)
    assert worker.with_threads(10**9).images_per_second == pytest.approx(400)
