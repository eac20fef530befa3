"""`daskcnn plan-conv`, and what a job and its workers do with the planner: limits refused, times remembered."""

from __future__ import annotations

import json
import math
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daskcnn.arrays import Device, Pool, single_threaded_blas
from daskcnn.cli import main as daskcnn
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.worker import tasks as worker
from daskcnn.cluster.worker.session import forget_run, session_of
from daskcnn.conv import ALGORITHMS, ConvSpec, plan, tuner
from daskcnn.conv.planner import candidates
from daskcnn.conv.timings import memory_of
from daskcnn.errors import JobError
from daskcnn.job.network import convolutions
from daskcnn.job.prepared import planning_device
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job, Workers
from daskcnn.launch.dry_run import readable_plan
from daskcnn.launch.prepared_job import fitted
from daskcnn.ps import RULES
from daskcnn.store import DATASETS, open_dataset
from daskcnn.training import worker_calibration
from daskcnn.training.replica import Replica
from daskcnn.training.worker_calibration import tune_convolutions
from tests.tiny_runs import tiny_data, tiny_job
from tests.toy_data import toy_dataset


def invoke(*args: object) -> Result:
    return CliRunner().invoke(daskcnn, ["plan-conv", *(str(a) for a in args)])


def planned(*args: object) -> dict[str, Any]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_line_a_convolution_and_why() -> None:
    result = invoke("50:500", "--batch", 4, "--threads", 1)
    assert result.exit_code == 0, result.output
    text = result.stdout
    for words in ("50:500, batch 4, float32", "threads 1", "1,024 MiB", "GFLOP/s", "conv1  5×5 3→50 on 32×32"):
        assert words in text
    assert "conv2  5×5 50→500 on 16×16" in text
    assert text.count("predicted") >= 2
    assert text.count("others: ") == 2


def test_one_convolution_by_the_options_of_the_layer() -> None:
    layer = (
        "conv",
        "--kernels",
        32,
        "--size",
        "3x1",
        "--stride",
        2,
        "--pad",
        "same",
        "--groups",
        32,
        "--dilation",
        "2x1",
    )
    result = planned(*layer, "--dataset", "28x27x32", "--batch", 4)
    (found,) = result["layers"]
    assert (found["algorithm"], found["spec"]["groups"], found["spec"]["dilation"]) == ("depthwise", 32, [2, 1])
    assert (found["spec"]["pad"], found["spec"]["pad_end"]) == ([1, 0], [1, 0])
    text = invoke(*layer, "--dataset", "28x27x32", "--batch", 4).stdout
    assert "3×1 32→32 on 28×27 stride 2, dilation 2×1, padding at the end 1×0, groups 32" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("conv", "--kernels", 4), "conv needs size"),
        (("conv", "--kernels", 4, "--size", "3x"), "write a number such as 3"),
        (("conv", "--kernels", 4, "--size", "same"), "conv needs int or [int, int] here"),
        (("conv", "--kernels", 4, "--size", 3, "--groups", 2), "groups=2: 3 input channels"),
        (("quick", "--groups", 2), "--groups: options of a single convolution"),
    ],
)
def test_wrong_options_of_a_convolution(options: tuple[object, ...], said: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_json_holds_the_plan_and_every_candidate() -> None:
    result = planned("quick", "--batch", 2, "--threads", 2, "--dtype", "float64", "--workspace-limit", "64MiB")
    assert (result["batch"], result["dtype"], result["threads"]) == (2, "float64", 2)
    assert result["workspace_limit"] == 64 << 20
    assert [layer["layer"] for layer in result["layers"]] == ["conv1", "conv2", "conv3"]
    device = Device(pool=Pool(2), workspace_limit=64 << 20)
    for i, layer in enumerate(result["layers"]):
        about: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in layer["spec"].items()}
        spec = ConvSpec(**about)
        expected = plan(spec, device, need_dx=i > 0)
        assert (layer["algorithm"], layer["why"]) == (expected.algorithm, expected.reason)
        assert (layer["seconds"], layer["workspace"]) == (expected.seconds, expected.workspace)
        assert layer["gflops_per_second"] == pytest.approx(expected.flops_per_second / 1e9)
        names = {c["algorithm"] for c in layer["candidates"]}
        assert names == {name for name, a in ALGORITHMS.items() if a.supports(spec)}
        assert {c["measured"] for c in layer["candidates"]} == {None}


@pytest.mark.parametrize(
    ("images", "shape"), [("cifar10", (32, 32, 3)), ("mnist", (28, 28, 1)), ("20x24x5", (20, 24, 5))]
)
def test_images_are_a_data_sets_or_of_any_size(images: str, shape: tuple[int, ...]) -> None:
    spec = planned("quick", "--batch", 1, "--dataset", images)["layers"][0]["spec"]
    assert (spec["H"], spec["W"], spec["C"]) == shape


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_can_be_named(name: str) -> None:
    spec = planned("50:500", "--batch", 1, "--dataset", name)["layers"][0]["spec"]
    assert (spec["H"], spec["W"], spec["C"]) == DATASETS[name].shape


def test_a_prepared_data_set_is_read(tmp_path: Path) -> None:
    path = tiny_data(tmp_path, name="ships", shape=(16, 12, 4))
    spec = planned("quick", "--batch", 1, "--dataset", path)["layers"][0]["spec"]
    assert (spec["H"], spec["W"], spec["C"]) == (16, 12, 4)


@pytest.fixture
def all_are_close(monkeypatch: pytest.MonkeyPatch, tuned: None) -> None:
    """Measure whatever there is: the model sees no clear winner."""
    monkeypatch.setattr(tuner, "CLOSE", math.inf)


def test_measuring_is_remembered_and_shown(cache: Path, all_are_close: None) -> None:
    first = planned("lenet5", "--batch", 1, "--dataset", "mnist", "--threads", 1, "--measure")
    assert all(layer["measured"] for layer in first["layers"])
    assert len(list(cache.glob("*.json"))) == 1
    memory_of.cache_clear()
    again = planned("lenet5", "--batch", 1, "--dataset", "mnist", "--threads", 1)
    assert again == first
    other = planned("lenet5", "--batch", 1, "--dataset", "mnist", "--threads", 2)
    assert not any(layer["measured"] for layer in other["layers"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["quik"], "did you mean 'quick'"),
        (["zzz"], "lenet5, quick, resnet18"),
        (["quick", "--batch", 0], "--batch"),
        (["quick", "--threads", 0], "--threads"),
        (["quick", "--threads", 4097], "--threads"),
        (["quick", "--dataset", "mnst"], "did you mean 'mnist'"),
        (["quick", "--dataset", "32x32"], "HxWxC"),
        (["quick", "--dataset", "0x4x3"], "HxWxC"),
        (["lenet5", "--dataset", "2x2x1"], "layer"),
        (["sae", "--dataset", "mnist"], "has no convolutions"),
        (["quick", "--dtype", "float16"], "--dtype"),
        (["quick", "--device", "tpu"], "--device"),
        (["quick", "--workspace-limit", "much"], "write a size such as 1GiB"),
        (["quick", "--workspace-limit", "0"], "write a size such as 1GiB"),
        (["quick", "--workspace-limit", "-1MiB"], "write a size such as 1GiB"),
        (["quick", "--workspace-limit", "1kB"], "raise the limit"),
        ([], "MODEL"),
    ],
)
def test_bad_input_is_refused_with_2_and_the_remedy(args: list[object], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in result.stderr


# --- a job ---


def test_a_job_whose_convolutions_do_not_fit_its_limit_is_refused(tmp_path: Path) -> None:
    path = tiny_data(tmp_path, shape=(64, 64, 8))
    large = {"model": {"layers": [{"layer": "conv", "kernels": 4, "size": 7}, {"layer": "dense", "units": 10}]}}
    job = resolve(tiny_job(path, train={"workspace_mib": 1, "batch_size": 512}, **large))
    with pytest.raises(JobError, match=r"layer conv1: workspace_limit=1048576 bytes: .*train.workspace_mib"):
        fitted(job, open_dataset(path))
    enough = resolve(tiny_job(path, train={"workspace_mib": 512, "batch_size": 512}, **large))
    fitted(enough, open_dataset(path))  # raises nothing


def test_the_plan_of_a_job_is_that_for_its_threads_and_limit(tmp_path: Path) -> None:
    path = tiny_data(tmp_path)
    prepared = fitted(resolve(tiny_job(path, train={"workspace_mib": 77, "threads": 3})), open_dataset(path))
    assert "77.0 MiB" in readable_plan(prepared)


def test_an_exact_job_is_planned_without_what_rounds_more() -> None:
    spec = ConvSpec(N=128, H=16, W=16, C=64, K=64, R=3, S=3, pad=(1, 1))
    for exact in (False, True):
        device = planning_device(Job.model_validate({"train": {"exact": exact}}))
        assert ("winograd-4x3" in {c.name for c in candidates(spec, device)}) is not exact


@pytest.mark.parametrize("value", [0, -1, 1.5, "1GiB"])
def test_the_limit_is_a_whole_number_of_mebibytes(value: object, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"train\.workspace_mib"):
        resolve(tiny_job(tiny_data(tmp_path), train={"workspace_mib": value}))


# --- a worker ---


def replica(folder: Path, **options: Any) -> Replica:
    layers = [{"layer": "conv", "kernels": 4, "size": 3}, {"layer": "conv", "kernels": 3, "size": 3}]
    job = {"data": {"validation": 30}, "model": {"layers": [*layers, {"layer": "dense", "units": 10}]}}
    dataset = toy_dataset(folder, size=10)
    return Replica(Job.model_validate({**job, "train": {"batch_size": 32}}), dataset, **options)


def test_a_worker_measures_the_convolutions_of_its_batches_once(
    tmp_path: Path, device: Device, all_are_close: None
) -> None:
    ticks = count()
    own = replica(tmp_path, device=device, clock=lambda: next(ticks) * 1e-6)
    with single_threaded_blas():
        tune_convolutions(own)
    shapes = convolutions(own.model, own.dataset.shape, 32, "float32")
    assert [name for name, _ in shapes] == ["conv1", "conv2"]
    assert all(plan(spec, device).measured for _, spec in shapes)
    looks = next(ticks)
    tune_convolutions(own)
    assert next(ticks) == looks + 1


@pytest.mark.parametrize(
    ("rule", "workers", "sizes"),
    [
        ("bsp", None, {32, 16, 8, 4}),
        ("bsp", 2, {32, 16, 8, 4}),
        ("bsp", 1, {32}),
        ("sgwu", 2, {32}),
        ("easgd", 2, {32}),
        (None, 2, {32}),
    ],
)
def test_a_worker_that_shares_steps_measures_shares_of_them(
    rule: str | None, workers: int | None, sizes: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = replica(tmp_path, device=Device(), clock=time.perf_counter), list[ConvSpec]()
    monkeypatch.setattr(worker_calibration, "tune", lambda specs, *_, **__: asked.extend(specs))
    cluster = own.job.cluster.model_copy(update={"workers": Workers(cpu=workers)})
    own.job = own.job.model_copy(update={"rule": rule and RULES[rule](), "cluster": cluster})
    tune_convolutions(own)
    assert {spec.N for spec in asked} == sizes
    assert len(asked) == 2 * len(sizes)


def test_tuning_keeps_to_its_seconds(tmp_path: Path, all_are_close: None) -> None:
    """A clock that jumps an hour a look: nothing is believed, and training goes on by the model."""
    ticks = count()
    own = replica(tmp_path, device=Device(), clock=lambda: next(ticks) * 3600.0)
    tune_convolutions(own)
    assert next(ticks) < 20  # two convolutions with four numbers of samples each
    assert memory_of(own.device.backend).entries == {}


def test_tuning_leaves_the_weights_alone(tmp_path: Path, all_are_close: None) -> None:
    own = replica(tmp_path, device=Device(), clock=time.perf_counter)
    before = own.host_weights()
    tune_convolutions(own)
    assert len(memory_of(own.device.backend).entries) == 2 * 4  # with all samples of a step, and with shares of them
    assert (own.host_weights() == before).all()


def test_calibration_goes_through_it(tmp_path: Path, cache: Path, all_are_close: None) -> None:
    path = tiny_data(tmp_path)
    job = resolve(tiny_job(path, train={"threads": 2, "workspace_mib": 96, "batch_size": 20, "exact": True}))
    try:
        measured = worker.calibrate("run", job, "cpu", open_dataset(path).fingerprint)
        device = session_of("run").replica.device
    finally:
        forget_run("run")
    assert isinstance(measured, Calibration)
    assert measured.conv_seconds.keys() == {"conv1"}
    assert (device.pool.threads, device.workspace_limit, device.exact) == (2, 96 << 20, True)
    (file,) = cache.glob("*.json")
    keys = json.loads(file.read_text())["entries"]
    assert {key.partition(" pad")[0] for key in keys} == {f"N{n} H8 W8 C3 K4 R3 S3 stride 1,1" for n in (20, 10, 5, 2)}
    assert all("2 threads" in key for key in keys)
