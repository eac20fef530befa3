"""A layer-sharded run follows one process, and moves the bytes of its plan: all of it in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskcnn.cluster.layers.step_graph import FUNCTIONS
from daskcnn.cluster.layers.task_context import Shelf
from daskcnn.cluster.layers.transfers import CALL, answer_part
from daskcnn.cluster.run import workers as run_workers
from daskcnn.cluster.run.admission import calibration_row
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.shell import layer_sharded
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.cluster.worker.tasks import score_weights
from daskcnn.errors import ClusterError
from daskcnn.events import EpochEnded, KernelsSharded, StepsEnded, Warned, WorkerJoined, WorkerLeft, WorkerLeftOut
from daskcnn.job.resolve import resolve
from daskcnn.nn import leaves, sequential_from_spec
from daskcnn.sharded.balance import ShareSearch, WorkerLink, WorkerLinks, traffic, weight_traffic
from daskcnn.sharded.cutting import stages_of
from daskcnn.store import open_dataset
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.shares import Shares
from tests.cluster.cluster_jobs import LAYERS, one_process
from tests.cluster.in_process import InProcess, LocalWorker, Tasks, TrainedHere, train_here
from tests.cluster.references import reference
from tests.cluster.sharded_networks import (
    BLOCKS,
    DENSE,
    INCEPTION,
    MERGED,
    REACHING,
    TOGETHER,
    UNDIVIDED,
    layer_job,
    step_bytes,
    step_plan,
)
from tests.standin import device_of
from tests.toy_data import toy_dataset

IMAGE, BATCH = (16, 16, 3), 8
EQUAL = LocalWorker()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """230 images of 16 by 16, of which 200 are trained on: 25 steps an epoch."""
    return toy_dataset(tmp_path_factory.mktemp("toy")).path


def toy_job(path: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """50 steps, unless sections say otherwise."""
    data = {"limit": 230, "validation": 30} | sections.pop("data", {})
    # at 0.01 a rounding error may flip a near-tie of a max pool, which float32 does not forgive within 50 steps
    train = {"batch_size": BATCH, "lr": 0.003} | sections.pop("train", {})
    return layer_job(path, "runs", data=data, train=train, **sections)


def model_of(layers: list[dict[str, Any]], dtype: str = "float64") -> dict[str, Any]:
    return {"layers": layers, "dtype": dtype}


def assert_follows(found: TrainedHere, job: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Step by step, and in the weights at the end."""
    expected = reference(job)
    assert [event.step for event in found.of(StepsEnded)] == list(range(1, len(expected.losses) + 1))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    if tolerance <= 1e-9:
        np.testing.assert_allclose(found.state.weights, expected.weights, rtol=1e-9, atol=1e-12)


# --- the numbers ---


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_layer_sharding_follows_one_process_for_50_steps(toy: str, workers: int, dtype: str, tolerance: float) -> None:
    job = toy_job(toy, model={"dtype": dtype})
    found = train_here(job, [EQUAL] * workers)
    assert len(found.losses) == 50
    assert_follows(found, job, tolerance)
    assert len(found.kernels) == workers
    assert sum(own["conv1"] for own in found.kernels.values()) == 6
    assert sum(own["conv2"] for own in found.kernels.values()) == 9
    assert all(min(own.values()) > 0 for own in found.kernels.values())


def test_layer_sharding_follows_one_process_with_another_optimizer(toy: str) -> None:
    """What stands for the network is the average; the weights that were trained are in the optimizer's state."""
    train = {"optimizer": "adamw", "lookahead": {"steps": 3, "alpha": 1.0, "last": 0.5}, "ema": 0.95, "epochs": 1}
    job = toy_job(toy, train=train, model={"dtype": "float64"})
    found, (losses, alone) = train_here(job, [EQUAL] * 2), one_process(job)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-9)
    state, n = found.state.optimizers["layer"], alone.layout.parameter_size
    np.testing.assert_allclose(state.vectors[-1], alone.weights[:n], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.state.weights[:n], alone.optimizer_state.vectors[-1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.state.weights[n:], alone.weights[n:], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state.vectors[:-1], alone.optimizer_state.vectors[:-1], rtol=1e-9, atol=1e-12)
    assert state.count == alone.optimizer_state.count
    assert np.abs(found.state.weights[:n] - alone.weights[:n]).max() > 1e-4


@pytest.mark.parametrize(
    ("workers", "sub_batches", "first", "wire"),
    [
        (3, 2, "kernels", "float32"),
        (2, 3, "samples", "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *((*shape, "kernels", "float32") for shape in [(2, 1), (3, 1), (2, 3)]),
                (3, 1, "samples", "float32"),
                (3, 1, "samples", "float16"),
            ]
        ),
    ],
)
def test_spread_layers_and_parts_of_minibatches_change_nothing(
    toy: str, workers: int, sub_batches: int, first: str, wire: str
) -> None:
    """Nor does it matter what of the first convolution is divided."""
    train = {"sub_batches": sub_batches, "first_conv": first}
    job = toy_job(toy, model=model_of(REACHING), train=train, cluster={"wire": wire})
    found = train_here(job, [EQUAL] * workers)
    assert len(found.losses) == 50
    assert_follows(found, job, 1e-9 if wire == "float32" else 0.02)
    (shards, *_) = found.of(KernelsSharded)
    assert {tuple(by.values()) for by in shards.divided.values()} == {(first, "kernels")}


@pytest.mark.parametrize("layers", [BLOCKS, INCEPTION], ids=["blocks", "inception"])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), pytest.param((1.0, 4.0, 1.5), marks=pytest.mark.slow)])
def test_convolutions_inside_of_blocks_and_branches_are_sharded(
    toy: str, layers: list[dict[str, Any]], speeds: tuple[float, ...]
) -> None:
    job = toy_job(toy, model=model_of(layers), train={"sub_batches": len(speeds) - 1, "epochs": 1})
    found = train_here(job, [LocalWorker(speed) for speed in speeds])
    assert_follows(found, job)
    first, *_ = (own for own in found.kernels.values())
    assert sum("/" in name for name in first) >= 5
    assert all(sum(own[name] > 0 for own in found.kernels.values()) > 1 for name in first)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("layers", UNDIVIDED.values(), ids=UNDIVIDED)
def test_a_network_with_little_or_nothing_to_divide_follows_one_process(
    toy: str, layers: list[dict[str, Any]], workers: int
) -> None:
    """Its steps hang on each other by a task or two, so that those of later steps come before earlier scores."""
    job = toy_job(toy, data={"limit": 94}, model=model_of(layers), train={"epochs": 2})
    found = train_here(job, [EQUAL] * workers)
    assert not [event for event in found.of(Warned) if "back to step" in event.text]
    assert_follows(found, job)


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[LocalWorker]]:
    """Sections of a job of a few steps, and its workers."""
    layers: list[dict[str, Any]] = draw(st.sampled_from([LAYERS, REACHING, TOGETHER, MERGED, BLOCKS, INCEPTION, DENSE]))
    whole = layers is MERGED
    by = ["kernels"] if layers in (MERGED, BLOCKS, INCEPTION, DENSE) else ["auto", "kernels", "samples"]
    train = {
        "sub_batches": 1 if whole else draw(st.integers(1, 4)),
        "first_conv": draw(st.sampled_from(by)),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "batch_size": draw(st.sampled_from([8, 5])),  # of 5, the last of an epoch is smaller
    }
    cluster = {"chain": draw(st.integers(1, 5)), "wire": draw(st.sampled_from(["float32", "float16"]))}
    workers = [LocalWorker(speed) for speed in draw(st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=1, max_size=4))]
    sections = {"train": train, "cluster": cluster, "model": model_of(layers)}
    return sections | {"data": {"limit": 62}}, workers


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(case=runs(), seed=st.integers(0, 1000))
def test_any_cut_of_any_network_follows_one_process(
    toy: str, case: tuple[dict[str, Any], list[LocalWorker]], seed: int
) -> None:
    """Whatever the workers' speeds, the order of their tasks, and how often the pieces are placed anew."""
    sections, workers = case
    job = toy_job(toy, **sections, run={"checkpoint_every": 1.0})
    job["train"]["epochs"] = 1
    found = train_here(job, workers, seed=seed)
    assert_follows(found, job, 0.05 if sections["cluster"]["wire"] == "float16" else 1e-9)


@st.composite
def given_kernels(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, int]]]:
    """A network with blocks, and any kernels of its stages for three workers: some work on one of two paths only."""
    layers: list[dict[str, Any]] = draw(st.sampled_from([BLOCKS, INCEPTION]))
    cut: list[dict[str, int]] = []
    for stage in stages_of(sequential_from_spec(layers)):
        total = stage.conv.kernels if stage.conv else 0
        edges = sorted(draw(st.lists(st.sampled_from([0, total, *range(total)]), min_size=2, max_size=2)))
        parts = [b - a for a, b in zip([0, *edges], [*edges, total], strict=True)]
        cut.append({f"cpu-{w}": n for w, n in enumerate(parts) if n})
    return layers, cut


@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(case=given_kernels(), seed=st.integers(0, 1000), parts=st.integers(1, 2))
def test_whoever_has_which_kernels_of_a_block_it_computes_the_same_and_moves_what_is_planned(
    toy: str, case: tuple[list[dict[str, Any]], list[dict[str, int]]], seed: int, parts: int
) -> None:
    layers, cut = case
    train = {"epochs": 1, "sub_batches": parts, "batch_size": BATCH}
    job = toy_job(toy, data={"limit": 2 * BATCH + 30}, model=model_of(layers), train=train)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShareSearch, "kernels", lambda _: [dict(own) for own in cut])
        found = train_here(job, [EQUAL] * 3, seed=seed)
    assert_follows(found, job)
    plan = step_plan(job, IMAGE, found.of(KernelsSharded)[0].record())
    assert [dict(own) for own in plan.kernels] == cut
    expected = {worker: (2 * up, 2 * down) for worker, (up, down) in step_bytes(plan).items()}
    assert moved(found) == dict.fromkeys(moved(found), (0, 0)) | expected


def test_what_every_worker_does_for_itself_comes_out_alike_everywhere(toy: str) -> None:
    """To the last bit, though what others send has lost digits on its way."""
    job = toy_job(toy, model=model_of(LAYERS, "float32"), train={"epochs": 1}, cluster={"wire": "float16"})
    kept: list[Tasks] = []
    train_here(job, [EQUAL] * 3, prepare=kept.append)
    shelves = [session.kept.find(Shelf) for session in kept[0].sessions.values()]
    first, *others = (shelf.get(("merged", 1), 25) for shelf in shelves if shelf is not None)
    assert len(others) == 2
    for other in others:
        np.testing.assert_array_equal(other.optimizer.vectors, first.optimizer.vectors)
        for (_, one), (_, two) in zip(leaves(other.params), leaves(first.params), strict=True):
            np.testing.assert_array_equal(one, two)


def test_cpus_and_a_gpu_share_a_layer(toy: str) -> None:
    job = toy_job(toy, model=model_of(REACHING), train={"epochs": 1})
    gpu = LocalWorker(4.0, kind="gpu", device=lambda: device_of("standin"))
    found = train_here(job, [EQUAL, gpu, EQUAL])
    assert found.of(KernelsSharded)[0].home == "cpu-1"
    assert {worker: own["conv1"] for worker, own in found.kernels.items()} == {"cpu-0": 4, "cpu-1": 16, "cpu-2": 4}
    assert_follows(found, job)


# --- the bytes ---


def moved(found: TrainedHere) -> dict[str, tuple[int, int]]:
    """Bytes up and down of the first epoch, by worker."""
    return {row.name: (row.bytes_up, row.bytes_down) for row in found.of(EpochEnded)[0].workers}


@pytest.mark.parametrize(
    ("layers", "workers", "parts", "first", "wire"),
    [
        (LAYERS, 1, 1, "kernels", "float32"),
        (LAYERS, 2, 1, "kernels", "float32"),
        (LAYERS, 3, 1, "kernels", "float16"),
        (LAYERS, 3, 2, "samples", "float32"),
        (REACHING, 2, 2, "kernels", "float32"),
        (REACHING, 2, 1, "kernels", "float16"),
        (REACHING, 3, 3, "samples", "float16"),
        (TOGETHER, 3, 1, "kernels", "float32"),
        (MERGED, 3, 1, "kernels", "float32"),
        (BLOCKS, 2, 1, "kernels", "float32"),
        (BLOCKS, 3, 2, "kernels", "float16"),
        (INCEPTION, 3, 1, "kernels", "float32"),
    ],
)
def test_a_run_is_the_plan_task_by_task_and_byte_by_byte(
    toy: str, layers: list[dict[str, Any]], workers: int, parts: int, first: str, wire: str
) -> None:
    """The epoch has three whole steps and a smaller one. The step by gradients that it leaves comes behind it."""
    job = toy_job(
        toy,
        data={"limit": 3 * BATCH + 5 + 30},
        model=model_of(layers, "float32"),
        train={"epochs": 1, "sub_batches": parts, "first_conv": first},
        cluster={"wire": wire},
    )
    found = train_here(job, [EQUAL] * workers)
    (shards,) = found.of(KernelsSharded)
    plan = step_plan(job, IMAGE, shards.record())
    steps = [replace(plan, samples=n, parts=min(parts, n)) for n in (BATCH, BATCH, BATCH, 5)]
    expected = dict.fromkeys(shards.kernels, (0, 0))
    for step in steps:
        expected |= {w: (expected[w][0] + up, expected[w][1] + down) for w, (up, down) in step_bytes(step).items()}
    assert moved(found) == expected
    tasks = Counter((task.label, task.worker) for step in steps for task in step.tasks)
    functions = FUNCTIONS.values()
    assert Counter((label, worker) for label, worker, function in found.ran if function in functions) == tasks


@pytest.mark.parametrize(("layers", "workers"), [(LAYERS, 2), (LAYERS, 3), (REACHING, 2)])
def test_counted_bytes_are_those_of_the_scheme(toy: str, layers: list[dict[str, Any]], workers: int) -> None:
    """Numbers a sample, whatever the minibatches, and numbers a step of what neighbours need."""
    job = toy_job(toy, model=model_of(layers, "float32"), train={"epochs": 1, "first_conv": "kernels"})
    found = train_here(job, [EQUAL] * workers)
    plan, epoch = step_plan(job, IMAGE, found.of(KernelsSharded)[0].record()), found.of(EpochEnded)[0]
    a_sample, a_step = traffic(plan), weight_traffic(plan)
    assert moved(found) == {
        worker: tuple(4 * (200 * each + epoch.step * more) for each, more in zip(own, a_step[worker], strict=True))
        for worker, own in a_sample.items()
    }
    assert all(min(each) > 0 for each in moved(found).values())


def test_float16_on_the_wire_halves_what_travels(toy: str) -> None:
    whole, half = (train_here(toy_job(toy, cluster={"wire": wire}), [EQUAL, EQUAL]) for wire in ("float32", "float16"))
    assert {w: (2 * up, 2 * down) for w, (up, down) in moved(half).items()} == moved(whole)
    np.testing.assert_allclose(half.losses, whole.losses, rtol=0.02)


# --- shares ---


def kernels_of(shards: KernelsSharded, worker: str) -> int:
    return sum(shards.kernels[worker].values())


def test_kernels_move_away_from_a_worker_that_is_slower_than_it_was_and_the_loss_does_not_notice(toy: str) -> None:
    """Kernels take their momentum along, and none of it may be lost."""
    job = toy_job(toy, train={"batch_size": 4, "epochs": 1}, model={"dtype": "float64"})
    found = train_here(job, [EQUAL, LocalWorker(throttle=1000.0)])
    first, *later = found.of(KernelsSharded)
    assert later
    assert kernels_of(later[-1], "cpu-1") < kernels_of(first, "cpu-1")
    assert kernels_of(later[-1], "cpu-0") + kernels_of(later[-1], "cpu-1") == 15
    assert any("shares no longer fit" in event.message for event in found.of(Warned) if event.message)
    assert_follows(found, job)
    (epoch,) = found.of(EpochEnded)
    assert all(row.conv_seconds for row in epoch.workers if row.name == "cpu-0")


def test_a_worker_that_comes_in_mid_run_takes_kernels_with_their_momentum_and_the_loss_does_not_notice(
    toy: str,
) -> None:
    job = toy_job(toy, train={"epochs": 1}, model={"dtype": "float64"})
    found = train_here(job, [EQUAL, EQUAL, LocalWorker(2.0)], comes={7: "cpu-2"})
    first, later = found.of(KernelsSharded)
    assert "cpu-2" not in first.kernels
    assert kernels_of(later, "cpu-2") > kernels_of(later, "cpu-0") > 0
    assert [event.worker for event in found.of(WorkerJoined)] == ["cpu-2"]
    (epoch,) = found.of(EpochEnded)
    assert {row.name for row in epoch.workers} == {"cpu-0", "cpu-1", "cpu-2"}
    assert_follows(found, job)


def test_a_worker_of_other_versions_that_comes_in_mid_run_is_left_out(toy: str) -> None:
    job = toy_job(toy, train={"epochs": 1}, model={"dtype": "float64"})
    found = train_here(job, [EQUAL, EQUAL, LocalWorker(versions={"zarr": "2.1"})], comes={7: "cpu-2"})
    (left,) = found.of(WorkerLeftOut)
    assert left.worker == "cpu-2"
    assert left.reason.startswith("worker cpu-2 (cpu-2) runs zarr 2.1 (here 3.")
    assert len(found.of(KernelsSharded)) == 1
    assert_follows(found, job)


def test_workers_that_are_lost_and_others_that_come_leave_the_weights_of_an_undisturbed_run(toy: str) -> None:
    job = toy_job(toy, model={"dtype": "float64"}, cluster={"chain": 10})
    found = train_here(job, [EQUAL] * 6, goes={11: "cpu-1", 14: "cpu-3"}, comes={17: "cpu-4", 30: "cpu-5"})
    assert [event.worker for event in found.of(WorkerJoined)] == ["cpu-4", "cpu-5"]
    assert [len(event.kernels) for event in found.of(KernelsSharded)] == [4, 3, 2, 3, 4]
    np.testing.assert_allclose(found.state.weights, reference(job).weights, rtol=1e-9, atol=1e-12)


def test_four_workers_two_and_four_again_leave_the_weights_of_an_undisturbed_run(toy: str) -> None:
    """Two leave in good order, home first: no step is trained twice."""
    job = toy_job(toy, model={"dtype": "float64"})
    found = train_here(job, [EQUAL] * 6, leaves={4: "cpu-0", 13: "cpu-1"}, comes={22: "cpu-4", 33: "cpu-5"})
    assert [event.worker for event in found.of(WorkerLeft)] == ["cpu-0", "cpu-1"]
    assert [len(event.kernels) for event in found.of(KernelsSharded)] == [4, 3, 2, 3, 4]
    assert_follows(found, job)


def test_more_workers_than_kernels_is_said_and_trains(toy: str) -> None:
    layers = [
        {"layer": "conv", "kernels": 2, "size": 3},
        {"layer": "maxpool", "size": 4},
        {"layer": "dense", "units": 10},
    ]
    job = toy_job(toy, model=model_of(layers), train={"epochs": 1})
    found = train_here(job, [EQUAL] * 3)
    assert_follows(found, job)
    (idle,) = [worker for worker, own in found.kernels.items() if not own["conv1"]]
    reason = "2 are few for 3 workers, and others are faster"
    assert [event.message for event in found.of(Warned)] == [f"worker {idle} gets no kernels of conv1: {reason}"]
    assert moved(found)[idle] == (0, 0)


@pytest.mark.parametrize("kernel_shares", ["measured", "speeds"])
def test_a_worker_behind_a_slow_link_gets_no_kernels_where_links_count(toy: str, kernel_shares: str) -> None:
    job = resolve(toy_job(toy, train={"kernel_shares": kernel_shares}))
    dataset, workers = open_dataset(toy, limit=230), {"cpu-0": LocalWorker(1.5), "cpu-1": EQUAL}
    here = InProcess.of(job, dataset, workers)
    context = here.context
    try:
        context.calibrations |= {name: each.calibration(job, dataset) for name, each in workers.items()}
        driver = LayerSharded(context, None)
        links = WorkerLinks({"cpu-1": WorkerLink(1e3, 0.01)})
        rows = {name: calibration_row(context.workers.alive[name], own) for name, own in context.calibrations.items()}
        known = {name: Measured(1 / (row.images_per_second or 1), row) for name, row in rows.items()}
        shares = Shares.of(driver.balance("cpu-0", known, links))
    finally:
        here.tasks.close()
    if kernel_shares == "speeds":
        assert shares.by_worker() == {"cpu-0": {"conv1": 4, "conv2": 5}, "cpu-1": {"conv1": 2, "conv2": 4}}
        assert shares.idle() == {}
    else:
        assert shares.by_worker()["cpu-1"] == {"conv1": 0, "conv2": 0}
        assert all("0.001 MB/s" in reason for reason in shares.idle().values())
        assert {layer for _, layer in shares.idle()} == {"conv1", "conv2"}


# --- what goes wrong ---


def test_a_worker_that_is_back_and_measures_itself_anew_judges_nothing(toy: str) -> None:
    """Its part would wait behind its measuring, and the epoch's end with it."""
    job = toy_job(toy, model={"dtype": "float64"}, train={"epochs": 1}, cluster={"chain": 10})

    def hold_up(tasks: Tasks) -> None:
        """It does not end measuring itself a second time."""
        own = "calibrate", "cpu-2"
        tasks.held_up = lambda label, task: (label, task.worker) == own and any(ran[:2] == own for ran in tasks.ran)

    found = train_here(job, [EQUAL] * 3, prepare=hold_up, goes={11: "cpu-2"}, comes={14: "cpu-2"})
    assert sorted(ran.worker for ran in found.ran if ran.function is score_weights) == ["cpu-0", "cpu-1"]
    np.testing.assert_allclose(found.state.weights, reference(job).weights, rtol=1e-9, atol=1e-12)


def test_a_part_that_is_not_to_be_had_costs_the_steps_since_the_snapshot_and_nothing_else(toy: str) -> None:
    job = toy_job(toy, model={"dtype": "float64"}, train={"epochs": 1}, cluster={"chain": 10})
    calls = []

    async def answer(**asked: Any) -> dict[str, Any]:
        calls.append(asked["step"])
        lost = asked["step"] == 13 and calls.count(13) == 1
        return {"missing": "somebody took it"} if lost else await answer_part(**asked)

    def lose_one(tasks: Tasks) -> None:
        for worker in tasks.workers.values():
            worker.handlers[CALL] = answer

    found = train_here(job, [EQUAL] * 3, prepare=lose_one)
    assert [event.message for event in found.of(Warned)] == ["somebody took it: back to step 10"]
    np.testing.assert_allclose(found.state.weights, reference(job).weights, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "while_",
    [
        *(orders.Calibrate, orders.MeasureLinks, orders.RunSegment, orders.StopSegment, orders.Collect, orders.Judge),
        *(orders.AskCounters(2), orders.Calibrate("cpu-2")),
    ],
)
def test_a_connection_that_is_cut_and_there_again_costs_no_worker_its_place(
    toy: str, monkeypatch: pytest.MonkeyPatch, while_: Any
) -> None:
    """Tasks that the scheduler has dropped are made anew, whatever they are for."""

    def measured(context: RunContext, home: str, workers: Sequence[str]) -> WorkerLinks:
        submit = context.dispatch.submit
        context.results.gather({worker: submit("link", list, worker=worker) for worker in workers}, within=10.0)
        return WorkerLinks({worker: WorkerLink(1e9, 0.0) for worker in workers})

    monkeypatch.setattr(layer_sharded, "measure_links", measured)
    monkeypatch.setattr(run_workers, "EXPLAINED", 0.1)
    epoch: dict[str, Any] = {"train": {"epochs": 1, "kernel_shares": "measured"}, "run": {"report_every": 100}}
    job = toy_job(toy, model={"dtype": "float64"}, **epoch)
    found = train_here(job, [EQUAL] * 3, comes={7: "cpu-2"}, cut_off=while_)
    assert not found.of(WorkerLeftOut)
    assert [event.worker for event in found.of(WorkerJoined)] == ["cpu-2"]
    np.testing.assert_allclose(found.state.weights, reference(job).weights, rtol=1e-9, atol=1e-12)


def test_a_gpu_that_is_advertised_but_absent_is_left_out(toy: str) -> None:
    missing = ClusterError("device gpu: no usable GPU on this worker")
    job = toy_job(toy, model={"dtype": "float64"}, train={"epochs": 1})
    found = train_here(job, [EQUAL, LocalWorker(kind="gpu", problem=missing)])
    (left,) = found.of(WorkerLeftOut)
    assert (left.worker, left.reason) == ("cpu-1", "device gpu: no usable GPU on this worker")
    assert found.kernels.keys() == {"cpu-0"}
    assert_follows(found, job)
