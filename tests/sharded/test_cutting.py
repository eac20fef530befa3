"""Which layers of blocks and branches become stages, which are added where, and what stays whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.nn import build_model, sequential_from_spec, walk
from daskcnn.nn.layers import Conv
from daskcnn.sharded.balance import ShareSearch, WorkerLink, explained, traffic
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.stages import Addend, Stage, added_channels, shares_of
from daskcnn.sharded.step_plan import StepPlan
from tests.cluster.sharded_networks import BLOCKS, INCEPTION

IMAGE = (16, 16, 3)
RELU, POOL, DENSE = {"layer": "relu"}, {"layer": "maxpool", "size": 2}, {"layer": "dense", "units": 10}
AROUND = {"layer": "maxpool", "size": 3, "stride": 1}
LRN: dict[str, Any] = {"layer": "lrn", "size": 3}


def conv(kernels: int, size: int = 3, **options: int) -> dict[str, Any]:
    return {"layer": "conv", "kernels": kernels, "size": size, "pad": size // 2, **options}


def residual(*path: dict[str, Any], shortcut: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"layer": "residual", "path": list(path)} | ({"shortcut": shortcut} if shortcut else {})


def cut(*layers: dict[str, Any]) -> tuple[Stage, ...]:
    return stages_of(sequential_from_spec(list(layers)))


def halves(stages: tuple[Stage, ...]) -> list[dict[str, int]]:
    return [{"a": s.conv.kernels // 2, "b": s.conv.kernels - s.conv.kernels // 2} if s.conv else {} for s in stages]


def plan(stages: tuple[Stage, ...], kernels: list[dict[str, int]]) -> StepPlan:
    return StepPlan.of(stages, IMAGE, kernels, "a")


# --- what becomes a stage ---


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "googlenet"])
def test_every_convolution_of_a_known_network_is_a_stage(name: str) -> None:
    image = (224, 224, 3) if name == "googlenet" else (32, 32, 3)
    model = build_model(name, None, image, 10)
    main = {path for path, layer, _ in walk(model, image) if isinstance(layer, Conv) and "auxiliary" not in path}
    assert {stage.name for stage in stages_of(model) if stage.name} == main


def test_the_path_of_a_block_adds_its_input_before_what_follows() -> None:
    first, inner, last = cut(conv(4), RELU, residual(conv(5), RELU, conv(4)), RELU, DENSE)
    assert (first.consumed, inner.inputs, last.inputs, last.consumed) == ((), (0,), (1,), (1, 0))
    assert last.addends == (Addend((0,), None, 0),)
    assert last.names == ["relu2"]
    assert last.summed is not None


def test_a_projection_is_a_stage_of_the_same_input_in_front_of_the_path_that_adds_it() -> None:
    stages = cut(conv(4), residual(conv(6, stride=2), conv(6), shortcut=[conv(6, 1, stride=2)]), DENSE)
    assert [stage.name for stage in stages[1:]] == [
        "residual1/shortcut/conv1",
        "residual1/path/conv1",
        "residual1/path/conv2",
    ]
    assert [stage.inputs for stage in stages] == [(), (0,), (0,), (2,)]
    assert stages[3].addends == (Addend((1,), None, 0),)


def test_branches_are_put_side_by_side_by_those_who_read_them() -> None:
    branches = {"layer": "branches", "branches": [[conv(2)], [{"layer": "pad", "size": 1}, AROUND, conv(3)], []]}
    _, one, two, last = cut(conv(4), branches, conv(5), DENSE)
    assert last.inputs == (1, 2, 0)
    assert two.lead is not None
    assert [name for name, _ in two.lead.layers] == ["branches1/branch2/pad1", "branches1/branch2/maxpool1"]
    assert one.lead is None


@pytest.mark.parametrize(
    "block",
    [
        residual(conv(5), conv(4), LRN),
        residual(conv(5), conv(4), {"layer": "add", "branches": [[], [{"layer": "batchnorm"}]]}),
        residual(conv(4), shortcut=[{"layer": "batchnorm"}]),
        residual({"layer": "branches", "branches": [[conv(2)], [conv(2)]]}),
        {"layer": "branches", "branches": [[conv(2)], [], []]},
        {"layer": "branches", "branches": [[conv(2)], [{"layer": "tanh"}]]},
        {"layer": "add", "branches": [[RELU], []]},
    ],
)
def test_what_cannot_be_cut_stays_whole(block: dict[str, Any]) -> None:
    first, last = cut(conv(4), RELU, block, conv(3), DENSE)
    assert [name for name, _ in (first.rest.layers if first.rest else ())] == [f"{block['layer']}1"]
    assert last.inputs == (0,)


def test_normalising_across_channels_behind_a_sum_is_put_together() -> None:
    *_, last, _ = cut(conv(4), residual(conv(4)), RELU, LRN, POOL, conv(3), DENSE)
    assert last.names == ["relu1"]
    assert [name for name, _ in (last.rest.layers if last.rest else ())] == ["lrn1", "maxpool1"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_channel_of_an_addend_goes_to_one_share(widths: list[int], kernels: list[int]) -> None:
    addend, found = Addend(tuple(range(len(widths))), None, 0), list[tuple[int, int]]()
    for share in shares_of(kernels):
        for stage, part, place in added_channels(addend, share, dict(enumerate(widths))):
            assert 0 < part.stop - part.start == place.stop - place.start
            found += [(stage, channel) for channel in range(part.start, part.stop)]
    every = [(stage, channel) for stage, count in enumerate(widths) for channel in range(count)]
    assert found == every[: sum(kernels)]


# --- what travels ---


def test_a_sum_costs_no_transfer_where_the_shares_are_the_same() -> None:
    """With the input it is what the same stages send without any addition."""
    added = cut(conv(4), residual(conv(6), conv(4)), conv(3), DENSE)
    bare = tuple(replace(stage, addends=()) for stage in added)
    assert traffic(plan(added, halves(added))) == traffic(plan(bare, halves(bare)))
    assert all(text.endswith("nothing travels for it") for text in explained(plan(added, halves(added))))


def test_a_projection_whose_shares_differ_sends_the_channels_that_others_add() -> None:
    """Of 8x8 pixels: b's path has channel 2, which a's shortcut made. All of a's three channels go there."""
    stages = cut(conv(4), residual(conv(6, stride=2), conv(6), shortcut=[conv(6, 1, stride=2)]), DENSE)
    equal = halves(stages)
    other = [*equal[:3], {"a": 2, "b": 4}]
    *_, text = explained(plan(stages, other))
    assert text == (
        "residual1/path/conv2: a, b each add their own channels of residual1/shortcut/conv1; "
        "192 numbers a sample travel for it"
    )
    moved = {
        way: sum(getattr(own, way) for own in traffic(plan(stages, other)).values())
        - sum(getattr(own, way) for own in traffic(plan(stages, equal)).values())
        for way in ("up", "down")
    }
    assert moved == {"up": 64 * 3 + 64, "down": 64 * 3 + 64}, "and the gradient of the one channel goes back"


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 3.0), (1.0, 1.5, 4.0)])
@pytest.mark.parametrize("layers", [BLOCKS, INCEPTION])
def test_the_search_gives_a_shortcut_the_shares_of_the_stage_that_adds_it(
    layers: list[dict[str, Any]], speeds: tuple[float, ...]
) -> None:
    stages = stages_of(sequential_from_spec(layers))
    seconds = {stage.name: 1 + 0.1 * n for n, stage in enumerate(stages) if stage.name}
    compute = {f"w{i}": {name: own * speed for name, own in seconds.items()} for i, speed in enumerate(speeds)}
    links = {worker: WorkerLink(1e6, 1e-5) for worker in compute}
    search = ShareSearch(stages, IMAGE, "w0", compute, links, samples=8)
    for found in (search.kernels(), search.by_compute, search.by_speeds_alone().kernels()):
        assert [sum(own.values()) for own in found] == [s.conv.kernels if s.conv else 0 for s in stages]
        for stage, own in zip(stages, found, strict=True):
            for addend in stage.addends:
                if addend.inputs and stages[addend.inputs[0]].label.endswith("shortcut/conv1"):
                    assert found[addend.inputs[0]] == own
    assert search.step_seconds(search.kernels()) <= search.step_seconds(search.by_compute)


def test_workers_that_get_nothing_at_all_are_told_why_in_one_sentence() -> None:
    stages = stages_of(sequential_from_spec(BLOCKS))
    compute = {w: {s.name: 0.001 for s in stages if s.name} | {"conv1": 0.002} for w in "ab"}
    search = ShareSearch(stages, IMAGE, "a", compute, {w: WorkerLink(1e4, 0.1) for w in "ab"}, samples=8)
    (reason,) = search.unused(search.kernels()).values()
    assert reason.startswith("of conv1, which would take it the longest, its share is not worth what it takes to send")
    assert search.by_speeds_alone().unused(search.by_speeds_alone().kernels()) == {}
