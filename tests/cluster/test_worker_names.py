"""What workers are called: by their users' names, each by one of its own that can be part of a file's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.cluster.link.members import LONGEST, advertised, chosen, given_name, unique_names
from daskcnn.job.tables import Workers

KINDS = st.sampled_from(["cpu", "gpu", "ps"])
NAMES = st.one_of(st.text(max_size=80), st.sampled_from(["", "cpu-0", "cpu-1", "desk", "desk-2", "group-0", "layer"]))


def known(**workers: Any) -> dict[str, dict[str, Any]]:
    """The scheduler's entries, by an address made of the key: of its name as it was given, or name and resources."""
    found = {}
    for i, (key, entry) in enumerate(workers.items()):
        name, resources = entry if isinstance(entry, tuple) else (entry, {"CPU": 1})
        found[f"tcp://10.0.0.{i}:{key}"] = {"name": name, "host": "here", "nthreads": 1, "resources": resources}
    return found


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("desk-1", "desk-1"),
        ("büro 2/links", "büro-2-links"),
        ("../../etc", "etc"),
        ("a\x1b[2J\n", "a--2J"),
        ("tcp://10.0.0.1:4000", ""),
        ("tls://[fe80::1]:4000", ""),
        (3, ""),
        (None, ""),
        ("", ""),
        ("...", ""),
        ("group-0", "worker-group-0"),
        ("layer", "worker-layer"),
        ("x" * 100, "x" * LONGEST),
    ],
)
def test_a_given_name_is_kept_as_far_as_a_file_may_have_it(given: object, shown: str) -> None:
    assert given_name(given) == shown


@given(st.lists(st.tuples(NAMES, KINDS), max_size=8), st.lists(NAMES, max_size=4))
def test_every_worker_has_a_name_of_its_own(workers: list[tuple[str, str]], taken: list[str]) -> None:
    given_names = [given_name(name) for name, _ in workers]
    names = unique_names(given_names, [kind for _, kind in workers], taken)
    assert len({*names, *taken}) == len(names) + len({*taken})
    assert all(name and all(c.isalnum() or c in "._-+@" for c in name) for name in names)
    for name, own, (_, kind) in zip(given_names, names, workers, strict=True):
        if not name:
            assert own.startswith(f"{kind}-")
        elif given_names.count(name) == 1 and name not in taken:
            assert own == name or name.startswith(("cpu-", "desk-2")), "unless the number of another made it"


def test_a_name_that_comes_again_gets_a_number() -> None:
    assert unique_names(["desk", "desk"], ["cpu", "cpu"]) == ["desk", "desk-2"]
    assert unique_names(["desk"], ["cpu"], ["desk", "desk-2"]) == ["desk-3"]
    assert unique_names(["cpu-1"], ["cpu"], ["cpu-0", "cpu-1", "cpu-2"]) == ["cpu-3"]
    assert unique_names(["", "cpu-0"], ["cpu", "cpu"]) == ["cpu-1", "cpu-0"], "a given name comes first"


def test_workers_without_names_are_numbered_by_kind() -> None:
    found = advertised(known(a="tcp://10.0.0.0:1", b=1, c=("tcp://10.0.0.9:1", {"GPU": 1}), d=("", {"PS": 1})))
    assert {m.address[-1]: m.name for m in found} == {"a": "cpu-1", "b": "cpu-0", "c": "gpu-0", "d": "ps-0"}


def test_a_run_calls_its_workers_by_the_names_that_the_doctor_shows() -> None:
    workers = known(a="desk-2", b="desk-1", c="tcp://10.0.0.2:1", d=("server", {"PS": 1}))
    members = chosen(advertised(workers), Workers(cpu=3))
    assert [m.name for m in members.workers] == ["desk-1", "desk-2", "cpu-0"]
    assert members.server.name == "server"


def test_names_that_differ_in_what_a_file_may_not_have_stay_apart() -> None:
    names = [m.name for m in advertised(known(a="desk/1", b="desk:1", c="desk-1"))]
    assert sorted(names) == ["desk-1", "desk-1-2", "desk-1-3"]
