"""What travels in a sharded step, and who gets which kernels for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.nn import build_model, sequential_from_spec
from daskcnn.nn.sequential import Sequential
from daskcnn.partition.proportions import kernel_shards
from daskcnn.sharded.balance import FREE, ShareSearch, WorkerLink, traffic, weight_traffic
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.plan_parts import WorkerTraffic
from daskcnn.sharded.stages import Stage, samples_first, shares_of
from daskcnn.sharded.step_plan import StepPlan

IN_SHAPE = (8, 8, 3)


def network(*layers: dict[str, Any]) -> tuple[Stage, ...]:
    return stages_of(sequential_from_spec(list(layers)))


def conv(kernels: int, size: int = 3) -> dict[str, Any]:
    return {"layer": "conv", "kernels": kernels, "size": size, "pad": size // 2}


POOL, DENSE = {"layer": "maxpool", "size": 2}, {"layer": "dense", "units": 10}
ALL_TO_ALL = network(conv(6), POOL, conv(4), POOL, DENSE)
TOGETHER = network(conv(6), {"layer": "dense", "units": 5}, {"layer": "relu"})


def totals(stages: tuple[Stage, ...], kernels: list[dict[str, int]]) -> dict[str, WorkerTraffic]:
    return traffic(plan(stages, kernels))


def plan(stages: tuple[Stage, ...], kernels: list[dict[str, int]], parts: int = 1) -> StepPlan:
    """Of a step whose home is a."""
    return StepPlan.of(stages, IN_SHAPE, kernels, "a", parts=parts)


def flows(stages: tuple[Stage, ...], kernels: list[dict[str, int]]) -> dict[tuple[int, str], dict[str, WorkerTraffic]]:
    """What travels of each stage and kind, where anything does."""
    return {(flow.stage, flow.what): flow.moved for flow in plan(stages, kernels).flows if flow.moved}


# --- shards by samples, and what every shard takes ---


LOCAL = network(conv(6), POOL, conv(4), {"layer": "dense", "units": 10})
BY_SAMPLES = samples_first(LOCAL)
SECONDS = {"conv1": 0.4, "conv2": 1.0}


def two(
    stages: tuple[Stage, ...] = LOCAL, link: WorkerLink = FREE, fixed: dict[str, float] | None = None
) -> ShareSearch:
    """Two equal workers."""
    workers = "a", "b"
    compute, links = dict.fromkeys(workers, SECONDS), dict.fromkeys(workers, link)
    return ShareSearch(stages, IN_SHAPE, "a", compute, links, fixed=dict.fromkeys(workers, fixed or {}))


def test_shards_of_samples_travel_as_many_numbers_as_shards_of_kernels() -> None:
    kernels = [{"a": 4, "b": 2}, {"a": 1, "b": 3}]
    assert totals(BY_SAMPLES, kernels) == totals(LOCAL, kernels)


def test_every_worker_gets_the_others_gradients_of_kernels_that_all_have() -> None:
    """27 weights and a bias a kernel."""
    found = weight_traffic(plan(BY_SAMPLES, [{"a": 3, "b": 2, "c": 1}, {"a": 4}]))
    assert found == dict.fromkeys("abc", WorkerTraffic(2 * 6 * 28, 2 * 6 * 28))


def test_what_every_shard_takes_is_part_of_a_step() -> None:
    balance = two(fixed={"conv1": 0.1, "conv2": 0.2})
    halves = [{"a": 3, "b": 3}, {"a": 2, "b": 2}]
    assert balance.step_seconds(halves) == pytest.approx(0.1 + 0.3 / 2 + 0.2 + 0.8 / 2)
    assert balance.step_seconds([{"a": 6}, {"a": 4}]) == pytest.approx(1.4)
    assert balance.kernels() == halves


def test_shards_of_samples_divide_that_too() -> None:
    balance = two(BY_SAMPLES, fixed={"conv1": 0.1, "conv2": 0.2})
    assert balance.step_seconds([{"a": 3, "b": 3}, {"a": 2, "b": 2}]) == pytest.approx(0.2 + 0.2 + 0.8 / 2)


@pytest.mark.parametrize(
    ("first", "fixed", "link", "by"),
    [
        ("auto", {"conv1": 0.1}, WorkerLink(), "samples"),
        ("auto", {}, WorkerLink(), "kernels"),  # as good
        ("auto", {"conv1": 0.1}, WorkerLink(latency=0.2), "kernels"),  # a message more between two steps
        ("kernels", {"conv1": 0.1}, WorkerLink(), "kernels"),
        ("samples", {}, WorkerLink(latency=0.2), "samples"),
    ],
)
def test_the_first_convolution_is_divided_by_what_is_shorter_or_asked_for(
    first: Any, fixed: dict[str, float], link: WorkerLink, by: str
) -> None:
    assert two(link=link, fixed=fixed).divided_by(first).stages[0].by == by


def test_a_network_that_cannot_be_divided_by_samples_is_not_unless_asked_for() -> None:
    balance = two(network(conv(6), {"layer": "batchnorm"}, conv(4), DENSE), fixed={"conv1": 0.3})
    assert balance.divided_by("auto") is balance
    with pytest.raises(ValueError, match="batchnorm1 takes the mean"):
        balance.divided_by("samples")


def test_a_second_worker_that_every_shard_takes_too_long_for_gets_none_and_is_told_why() -> None:
    """Half a step less of either layer's last tenth is not worth 50 ms a message."""
    balance = two(link=WorkerLink(latency=0.05), fixed={"conv1": 0.36, "conv2": 0.9})
    assert balance.kernels() == [{"a": 6}, {"a": 4}]
    assert "not worth what it takes to send" in balance.idle(balance.kernels())["b", "conv2"]
    twice = {layer: 2 * seconds for layer, seconds in SECONDS.items()}
    slower = replace(two(), compute={"a": SECONDS, "b": twice}, fixed={"b": {"conv1": 0.7, "conv2": 1.7}})
    assert slower.kernels() == [{"a": 6}, {"a": 4}]
    told = slower.idle(slower.kernels())["b", "conv2"]
    assert told == "a shard of any size would take it 1.7 s of the layer's 2 s a step"


@given(st.sampled_from([LOCAL, BY_SAMPLES]), st.floats(0, 0.4), st.integers(1, 5), st.floats(0.1, 10))
def test_a_stage_s_seconds_follow_from_those_of_any_part(
    stages: tuple[Stage, ...], fixed: float, mine: int, slower: float
) -> None:
    balance = two(stages, fixed={"conv1": fixed})
    least = fixed if stages is LOCAL else 0.0
    seconds = slower * (least + (0.4 - least) * mine / 6)
    assert balance.whole_seconds("a", 0, {"a": mine, "b": 6 - mine}, seconds) == pytest.approx(slower * 0.4)


def test_layers_that_are_not_spread_for_small_shards_take_home_its_seconds_of_them() -> None:
    """Shards of two channels would hold all six of three workers: home normalises alone."""
    stages = network(conv(6), {"layer": "lrn", "size": 3}, POOL, conv(4), DENSE)
    workers = "a", "b", "c"
    compute = {"a": {"conv1": 0.8, "conv2": 1.0}, "b": SECONDS, "c": SECONDS}
    cut = [dict.fromkeys(workers, 2), {"a": 4}]
    found = ShareSearch(stages, IN_SHAPE, "a", compute, apart={"a": 0.25, "b": 0.1, "c": 0.1})
    assert stages[0].spread_for([2, 2, 2]) != stages[0]
    assert found.step_seconds(cut) == pytest.approx(0.25 * 0.8 + 0.75 * 0.8 / 3 + 1.0)
    assert found.whole_seconds("b", 0, cut[0], 0.9 * 0.4 / 3) == pytest.approx(0.4)


def test_what_is_fixed_goes_with_a_worker_s_speed() -> None:
    found = two(fixed={"conv1": 0.1, "conv2": 0.2}).measured({"a": {"conv1": 0.8}})
    assert found.fixed["a"] == pytest.approx({"conv1": 0.2, "conv2": 0.2})
    assert found.fixed["b"] == pytest.approx({"conv1": 0.1, "conv2": 0.2})


# --- what travels ---


def test_one_worker_sends_nothing() -> None:
    assert totals(ALL_TO_ALL, [{"a": 6}, {"a": 4}]) == {"a": WorkerTraffic(0, 0)}


def test_outputs_go_to_every_worker_of_the_next_stage_and_gradients_the_same_way_back() -> None:
    """4×4 pixels a channel behind the pool; only a has the loss. Of the last layer everybody sends 10 sums."""
    found = totals(ALL_TO_ALL, [{"a": 4, "b": 2}, {"a": 1, "b": 3}])
    pixels, sums = 16, 10
    a_up = pixels * 4 + pixels * 2 + sums  # its outputs; its part of the gradient of b's; the loss's gradient
    b_up = pixels * 2 + pixels * 4 + sums  # its outputs; its part of the gradient of a's; its sums
    assert found == {"a": WorkerTraffic(a_up, b_up), "b": WorkerTraffic(b_up, a_up)}


def test_without_a_layer_that_sums_the_last_outputs_go_to_home() -> None:
    """2×2 pixels a channel."""
    found = totals(network(conv(4), POOL, POOL, {"layer": "flatten"}, DENSE), [{"a": 1, "b": 3}])
    assert found == {"a": WorkerTraffic(4 * 3, 4 * 3), "b": WorkerTraffic(4 * 3, 4 * 3)}


def test_who_has_no_kernels_of_the_next_stage_is_not_sent_its_inputs() -> None:
    found = totals(ALL_TO_ALL, [{"a": 4, "b": 2}, {"a": 4}])
    assert found == {"a": WorkerTraffic(32, 32), "b": WorkerTraffic(32, 32)}


def test_what_is_put_together_at_home_goes_out_whole() -> None:
    """The local contrast of all channels is normalised at home: 8×8 pixels in, 8×8 pixels of all 6 channels out."""
    stages = network(conv(6), {"layer": "lrn", "size": 5}, conv(4), DENSE)
    assert stages[0].spread_for([2, 2, 2]).rest is not None  # more than there are would be made twice
    found = totals(stages, [{"a": 2, "b": 2, "c": 2}, {"b": 4}])
    assert found["c"] == WorkerTraffic(64 * 2, 64 * 2)
    assert found["b"] == WorkerTraffic(64 * 2 + 64 * 6 + 10, 64 * 2 + 64 * 6 + 10)
    assert found["a"] == WorkerTraffic(found["b"].down + found["c"].down, found["b"].up + found["c"].up)


def test_a_network_that_begins_without_a_convolution_sends_its_input_from_home() -> None:
    stages = network({"layer": "averagepool", "size": 2}, conv(4), DENSE)
    found = totals(stages, [{}, {"a": 2, "b": 2}])
    inputs, sums = 4 * 4 * 3, 10
    assert found == {"a": WorkerTraffic(inputs + sums, inputs + sums), "b": WorkerTraffic(inputs + sums, inputs + sums)}


def test_neighbours_that_are_reached_over_get_gradients_and_kernels_of_the_edge_as_well() -> None:
    stages = network(conv(40), {"layer": "lrn", "size": 3}, POOL, conv(1))
    kernels = [{"a": 20, "b": 20}, {"a": 1}]
    found = totals(stages, kernels)
    assert found["b"] == WorkerTraffic(16 * 20, 16 * 21)
    assert_edges(stages, kernels, weights=3 * 3 * 3 + 1)


def test_neighbours_need_what_a_layer_that_sums_multiplies_their_channels_by() -> None:
    stages = network(conv(40), {"layer": "lrn", "size": 3}, POOL, DENSE)
    assert_edges(stages, [{"a": 20, "b": 20}], weights=3 * 3 * 3 + 1 + 4 * 4 * 10)


def assert_edges(stages: tuple[Stage, ...], kernels: list[dict[str, int]], *, weights: int) -> None:
    """Of a kernel so many numbers; two kernels each way."""
    assert weight_traffic(plan(stages, kernels)) == {
        "a": WorkerTraffic(2 * weights, 2 * weights),
        "b": WorkerTraffic(2 * weights, 2 * weights),
    }


WORKERS = ("a", "b", "c")
shares = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


@given(st.lists(shares, min_size=2, max_size=2))
def test_what_one_sends_another_gets(cut: list[list[int]]) -> None:
    kernels = [{w: n for w, n in zip(WORKERS, own, strict=True) if n} for own in cut]
    stages = network(conv(sum(cut[0])), POOL, conv(sum(cut[1])), DENSE)
    found = totals(stages, kernels)
    assert sum(each.up for each in found.values()) == sum(each.down for each in found.values())
    assert all(any(own) for moved in flows(stages, kernels).values() for own in moved.values())


@pytest.mark.parametrize(
    "behind", [[POOL], [{"layer": "lrn", "size": 3}], [{"layer": "relu"}, {"layer": "lrn", "size": 3}]]
)
@given(st.lists(shares, min_size=2, max_size=2))
def test_a_flow_is_all_messages_of_its_kind(behind: list[dict[str, Any]], cut: list[list[int]]) -> None:
    """As they would be counted one by one, from maker to taker."""
    kernels = [{w: n for w, n in zip(WORKERS, own, strict=True) if n} for own in cut]
    stages = network(
        conv(sum(cut[0])),
        *behind,
        conv(sum(cut[1])),
        {"layer": "relu"},
        {"layer": "dense", "units": 5},
        {"layer": "relu"},
    )
    stages = tuple(s.spread_for(list(own.values())) for s, own in zip(stages, kernels, strict=True))
    one_by_one: dict[tuple[int, str], dict[str, list[int]]] = {}

    def message(kind: tuple[int, str], sender: str, receiver: str, numbers: int) -> None:
        if sender != receiver:
            for end, worker in enumerate((sender, receiver)):
                one_by_one.setdefault(kind, {}).setdefault(worker, [0, 0])[end] += numbers

    for i, (stage, size, more) in enumerate(zip(stages, (64, 0), (0, 5), strict=True)):
        together = stage.rest is not None
        if stage.spread is not None and POOL["layer"] in behind[0].values() and i == 0:
            size = 16
        own = dict(zip(kernels[i], shares_of(list(kernels[i].values()), stage.reach), strict=True))
        for maker, share in own.items():
            for taker in ["a"] if together else kernels[1]:
                message((i, "outputs"), maker, taker, size * (share.stop - share.start) + more)
                message((i, "gradients"), taker, maker, size * (share.graded.stop - share.graded.start) + more)
        if together and i == 0:
            for taker in kernels[1]:
                message((0, "merged outputs"), "a", taker, 64 * sum(cut[0]))
                message((0, "merged gradients"), taker, "a", 64 * sum(cut[0]))
    found = flows(stages, kernels)
    assert {kind: {w: [*own] for w, own in moved.items()} for kind, moved in found.items()} == one_by_one


# --- what the scheduler takes ---


def test_tasks_of_a_step_on_one_worker_and_two() -> None:
    """Two stages there and back, and the score."""
    assert plan(LOCAL, [{"a": 6}, {"a": 4}]).task_count == 2 + 2 + 1
    assert plan(LOCAL, [{"a": 3, "b": 3}, {"a": 2, "b": 2}]).task_count == 4 + 4 + 1
    assert plan(BY_SAMPLES, [{"a": 3, "b": 3}, {"a": 2, "b": 2}]).task_count == 4 + 4 + 1
    assert plan(LOCAL, [{"a": 3, "b": 3}, {"a": 2, "b": 2}], parts=4).task_count == 4 * 8 + 1
    three = [dict.fromkeys("abc", 2), dict.fromkeys("abc", 1)]
    assert plan(LOCAL, three).task_count == 6 + 6 + 1


def test_a_head_that_is_more_than_a_bias_or_whose_home_has_no_kernels_is_a_task() -> None:
    two_layers = network(conv(6), POOL, conv(4), {"layer": "dense", "units": 5}, {"layer": "relu"}, DENSE)
    halves = [{"a": 3, "b": 3}, {"a": 2, "b": 2}]
    assert plan(two_layers, halves).task_count == plan(LOCAL, halves).task_count + 1
    away = [{"a": 3, "b": 3}, {"b": 4}]
    assert plan(LOCAL, away).task_count == 4 + 2 + 1 + 1
    assert plan(LOCAL, halves).judges == ["a", "b"]
    assert plan(two_layers, halves).judges == plan(LOCAL, away).judges == ["a"]
    alone = [{"a": 6}, {"a": 4}]  # nor is it part of the way back where home has all kernels
    assert plan(two_layers, alone).task_count == plan(LOCAL, alone).task_count + 1


def test_sums_go_to_everybody_with_kernels_and_no_gradient_of_them_comes_back() -> None:
    three = [{"a": 6}, {"a": 2, "b": 1, "c": 1}]
    found = flows(LOCAL, three)
    assert found[1, "outputs"] == dict.fromkeys("abc", WorkerTraffic(2 * 10, 2 * 10))
    assert (1, "gradients") not in found


def test_what_the_scheduler_takes_for_tasks_is_part_of_a_step() -> None:
    halves = [{"a": 3, "b": 3}, {"a": 2, "b": 2}]
    plain = two()
    slow = replace(plain, task=0.001, parts=2)
    more = 0.001 * plan(LOCAL, halves, parts=2).task_count
    assert slow.step_seconds(halves) == pytest.approx(plain.step_seconds(halves) + more)


def test_workers_that_are_not_worth_their_tasks_get_no_kernels() -> None:
    """Each of 16 brings four tasks and more, of which the scheduler hands out one after the other."""
    stages = stages_of(build_model("50:500", None, (32, 32, 3), 10, True))
    workers = [f"w{i:02}" for i in range(16)]
    compute = {w: {"conv1": 0.001, "conv2": 0.004} for w in workers}
    free = ShareSearch(stages, (32, 32, 3), "w00", compute, samples=64)
    busy = replace(free, task=0.002)
    assert {len(own) for own in free.kernels()} == {16}
    assert max(len(own) for own in busy.kernels()) < 16
    assert busy.step_seconds(busy.kernels()) < busy.step_seconds(free.kernels())
    reason = busy.idle(busy.kernels())["w15", "conv2"]
    assert reason == "its share is not worth the scheduler's 2 ms for each task that it would bring"


# --- who gets which kernels ---


def balance(stages: tuple[Stage, ...], seconds: dict[str, float], **options: Any) -> ShareSearch:
    compute = {w: {s.name: own for s in stages if s.name} for w, own in seconds.items()}
    return ShareSearch(stages, IN_SHAPE, "a", compute, **options)


def test_without_links_shares_are_the_paper_s() -> None:
    found = balance(network(conv(40), POOL, conv(24), DENSE), {"a": 1.0, "b": 3.0})
    assert found.kernels() == found.by_compute == [{"a": 30, "b": 10}, {"a": 18, "b": 6}]
    assert not found.idle(found.kernels())


def test_a_worker_behind_a_slow_link_gets_none_and_it_is_said_why() -> None:
    found = balance(ALL_TO_ALL, {"a": 1.0, "b": 1.0}, links={"b": WorkerLink(10.0, 0.001)})
    assert found.kernels() == [{"a": 6}, {"a": 4}]
    reasons = found.idle(found.kernels())
    assert reasons.keys() == {("b", "conv1"), ("b", "conv2")}
    assert all("its link (1e-05 MB/s, 1 ms a message)" in reason for reason in reasons.values())


def test_the_faster_the_link_the_more_kernels() -> None:
    stages = network(conv(100), POOL, conv(100), DENSE)
    given = []
    for bandwidth in (1e3, 1e5, 1e6, 1e9):
        kernels = balance(stages, {"a": 1.0, "b": 1.0}, links={"b": WorkerLink(bandwidth)}).kernels()
        given.append(sum(own.get("b", 0) for own in kernels))
    assert given == sorted(given)
    assert given[0] == 0
    assert given[-1] >= 99


def test_more_workers_than_kernels_leave_some_without_and_it_is_said() -> None:
    found = balance(network(conv(2), POOL, conv(24), DENSE), {"a": 1.0, "b": 1.0, "c": 1.0})
    assert found.kernels() == [{"a": 1, "b": 1}, {"a": 8, "b": 8, "c": 8}]
    assert found.idle(found.kernels()) == {("c", "conv1"): "2 are few for 3 workers, and others are faster"}


def test_whole_kernels_that_leave_a_worker_without_any_are_not_blamed_on_its_link() -> None:
    found = balance(network(conv(2), POOL, DENSE), {"a": 1.0, "b": 2.1, "c": 2.2})
    assert found.kernels() == [{"a": 2}]  # eq. 1 would give b one of them
    assert set(found.idle(found.kernels()).values()) == {"2 are few for 3 workers, and others are faster"}


def test_latency_alone_may_not_be_worth_it() -> None:
    slow = balance(ALL_TO_ALL, {"a": 0.01, "b": 0.01}, links={"b": WorkerLink(latency=1.0)})
    assert slow.kernels() == [{"a": 6}, {"a": 4}]


def test_more_workers_do_not_make_a_step_longer() -> None:
    """150:800 over 1 Gb/s, batch 256: each must be sent the whole input, and is left out where that costs more."""
    stages = stages_of(build_model("150:800", None, (32, 32, 3), 10, True))
    taken = []
    for count in (1, 2, 4, 8, 16):
        workers = [f"w{i:02}" for i in range(count)]
        compute = {w: {"conv1": 0.3 / 256, "conv2": 1.5 / 256} for w in workers}
        links = {w: WorkerLink(125e6, 0.0005) for w in workers}
        found = ShareSearch(stages, (32, 32, 3), "w00", compute, links, samples=256)
        taken.append(found.step_seconds(found.kernels()))
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < taken[0]


times = st.floats(0.01, 10)


@given(st.lists(times, min_size=3, max_size=3), st.floats(1e2, 1e8), st.floats(0, 0.1))
def test_never_slower_than_the_paper_s_shares_or_home_alone(
    seconds: list[float], bandwidth: float, late: float
) -> None:
    links = {w: WorkerLink(bandwidth, late) for w in WORKERS}
    found = balance(ALL_TO_ALL, dict(zip(WORKERS, seconds, strict=True)), links=links, samples=8)
    taken = found.step_seconds(found.kernels())
    assert [sum(own.values()) for own in found.kernels()] == [6, 4]
    assert taken <= found.step_seconds(found.by_compute)
    assert taken <= found.step_seconds([{"a": 6}, {"a": 4}])


@given(st.lists(times, min_size=2, max_size=2), st.floats(1e2, 1e6))
def test_within_a_fifth_of_the_best_of_all_cuts(seconds: list[float], bandwidth: float) -> None:
    """Stages are cut one after the other, so that it need not be the best of all. Home is the fastest."""
    links = {w: WorkerLink(bandwidth) for w in "ab"}
    found = balance(ALL_TO_ALL, dict(zip("ab", sorted(seconds), strict=True)), links=links, samples=8)
    cuts = [[{w: n for w, n in zip("ab", (k, own - k), strict=True) if n} for k in range(own + 1)] for own in (6, 4)]
    best = min(found.step_seconds(list(cut)) for cut in product(*cuts))
    assert best * (1 - 1e-9) <= found.step_seconds(found.kernels()) <= best * 1.2


def test_the_papers_network_over_five_megabytes_a_second() -> None:
    """50:500 on CIFAR-10's images, batch 64: two equal workers, half a second a step of the one."""
    model: Sequential = build_model("50:500", None, (32, 32, 3), 10, True)
    compute = {w: {"conv1": 0.1 / 64, "conv2": 0.4 / 64} for w in "ab"}
    slow, fast = (
        ShareSearch(stages_of(model), (32, 32, 3), "a", compute, {w: WorkerLink(rate, 0.001) for w in "ab"}, samples=64)
        for rate in (5e6, 1e9)
    )
    alone = [{"a": 50}, {"a": 500}]
    assert fast.step_seconds(fast.kernels()) < 0.75 * fast.step_seconds(alone)
    assert slow.kernels() == alone


# --- shares by speed alone ---


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    bandwidth=st.floats(1.0, 1e9),
    task=st.floats(0, 1),
    first=st.sampled_from(["auto", "kernels", "samples"]),
)
def test_by_speeds_alone_shares_are_eq_1_whatever_links_and_tasks_take(
    seconds: list[float], bandwidth: float, task: float, first: Any
) -> None:
    compute = {f"w{i}": {"conv1": each, "conv2": 2 * each} for i, each in enumerate(seconds)}
    links = {worker: WorkerLink(bandwidth, 0.1) for worker in compute}
    found = ShareSearch(LOCAL, IN_SHAPE, "w0", compute, links, samples=64, task=task, fixed=compute)
    by_speeds = found.asked_for("speeds", first)
    for stage, own in zip(by_speeds.stages, by_speeds.kernels(), strict=True):
        shares = kernel_shards(stage.conv.kernels, seconds) if stage.conv else [0] * len(seconds)
        assert own == {worker: n for worker, n in zip(compute, shares, strict=True) if n}
    slower = {"w0": {"conv1": 20.0, "conv2": 40.0}}
    assert by_speeds.measured(slower).kernels() == by_speeds.measured(slower).by_compute, "kernels move by eq. 1 too"


def test_by_speeds_alone_the_worst_link_counts_for_nothing() -> None:
    found = two(link=WorkerLink(1.0, 10.0))
    assert [*map(len, found.kernels())] == [1, 1]
    assert [*map(len, found.by_speeds_alone().kernels())] == [2, 2]
    assert found.by_speeds_alone().idle(found.by_speeds_alone().kernels()) == {}
