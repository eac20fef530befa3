"""A training state survives being a checkpoint; a checkpoint of another network is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.errors import DataError
from daskcnn.job.network import layout_of
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.nn.score import Score
from daskcnn.ps import BSP, LocalSGD
from daskcnn.ps.auto import ALONE
from daskcnn.ps.wire import encode
from daskcnn.runs.checkpoint import Checkpoint, latest
from daskcnn.runs.state import TrainingState, facts_of, for_rule, to_state
from daskcnn.store import open_dataset
from daskcnn.store.image_facts import Facts
from daskcnn.training.trained_network import to_classifier
from tests.tiny_runs import CLASSES, LAYERS, random_state, tiny_job, tiny_run


@pytest.fixture
def raw(path: str) -> dict[str, Any]:
    return tiny_job(path)


def kept(folder: Path, raw: dict[str, Any], state: TrainingState) -> Checkpoint:
    """The state as it is read back from the disk."""
    found = latest(tiny_run(folder, raw, state) / "checkpoints", warn=pytest.fail)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "validation", [None, Score(12.5, 11, 20), Score(float("nan"), 0, 20), Score(12.5, 51, 20, answers=3)]
)
def test_a_state_comes_back_from_disk(
    tmp_path: Path, raw: dict[str, Any], dtype: str, validation: Score | None
) -> None:
    raw["model"]["dtype"] = dtype
    job = resolve(raw)
    state = random_state(job, validation=validation)
    checkpoint = kept(tmp_path, raw, state)
    back = to_state(checkpoint, job)
    assert (back.step, back.epoch, back.book) == (state.step, state.epoch, state.book)
    assert back.weights.dtype == dtype
    np.testing.assert_array_equal(back.weights, state.weights)
    assert back.optimizers.keys() == state.optimizers.keys()
    for worker, own in state.optimizers.items():
        np.testing.assert_array_equal(back.optimizers[worker].vectors, own.vectors)
        assert back.optimizers[worker].count == own.count
    assert checkpoint.score == (validation and validation.accuracy)
    assert checkpoint.state["seconds"] == 12.5


def test_what_pushes_have_lost_comes_back_while_they_travel_in_int8(tmp_path: Path, raw: dict[str, Any]) -> None:
    raw["cluster"] = raw.get("cluster", {}) | {"wire": "int8"}
    job = resolve(raw)
    state = random_state(job)
    rest = encode(np.linspace(-1e-3, 1e-3, len(state.weights), dtype=np.float32))
    checkpoint = kept(tmp_path, raw, replace(state, rests={"w0": rest}))
    back = to_state(checkpoint, job)
    assert {name: own.tobytes() for name, own in back.rests.items()} == {"w0": rest.tobytes()}
    assert back.optimizers.keys() == state.optimizers.keys()
    assert not to_state(checkpoint, resolve({**raw, "cluster": {}})).rests
    damaged = replace(checkpoint, arrays={**checkpoint.arrays, "rest:w0": rest[:-1]})
    with pytest.raises(DataError, match="rest:w0"):
        to_state(damaged, job)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_optimizer_s_state_goes_with_a_run_from_rule_to_rule(
    tmp_path: Path, raw: dict[str, Any], optimizer: str
) -> None:
    raw["train"] |= {"optimizer": optimizer, "strategy": "auto"}
    job = resolve({**raw, "rule": {}})
    state = random_state(job)
    layout = layout_of(job, facts_of(kept(tmp_path, raw, state)))
    together = for_rule(state, BSP(), job, layout, ("cpu-0", "cpu-1"))
    assert not together.optimizers
    apart = for_rule(together, LocalSGD(), job, layout, ("cpu-0", "cpu-1", "cpu-2"))
    mean = np.mean([own.vectors for own in state.optimizers.values()], axis=0)
    for own in apart.optimizers.values():
        np.testing.assert_allclose(own.vectors, mean, rtol=1e-6)
        assert own.count == max(each.count for each in state.optimizers.values())
    assert apart.optimizers.keys() == {"cpu-0", "cpu-1", "cpu-2"}
    assert not apart.rule_state
    velocity = replace(apart, rule_state={"velocity": state.weights})
    assert {*for_rule(velocity, LocalSGD(), job, layout, ()).rule_state} == {"velocity"}
    assert not for_rule(velocity, ALONE, job, layout, ("cpu-0",)).rule_state
    for number, each in enumerate((together, velocity)):  # whatever it was trained by last, a run goes on from it
        back = to_state(kept(tmp_path / str(number), raw, each), job)
        assert back.rule_state.keys() == each.rule_state.keys()


@pytest.mark.parametrize("train", [{"optimizer": "adamw"}, {"optimizer": "lars", "lookahead": {}}])
def test_every_optimizer_s_state_comes_back(tmp_path: Path, raw: dict[str, Any], train: dict[str, Any]) -> None:
    raw["train"] |= train
    job = resolve(raw)
    state = random_state(job)
    back = to_state(kept(tmp_path, raw, state), job)
    assert back.optimizers.keys() == state.optimizers.keys() == {"w0", "w1"}
    for worker, own in state.optimizers.items():
        np.testing.assert_array_equal(back.optimizers[worker].vectors, own.vectors)
        assert (back.optimizers[worker].count, len(own.vectors)) == (own.count, 2)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, raw: dict[str, Any]) -> None:
    checkpoint = kept(tmp_path, raw, random_state(resolve(raw)))
    raw["train"]["optimizer"] = "adamw"
    with pytest.raises(DataError, match="keeps velocity:w0, velocity:w1 of an optimizer, 'adamw' keeps mean, square"):
        to_state(checkpoint, resolve(raw))


def test_a_missing_vector_of_an_optimizer_is_named(tmp_path: Path, raw: dict[str, Any]) -> None:
    raw["train"]["optimizer"] = "adamw"
    job = resolve(raw)
    checkpoint = kept(tmp_path, raw, random_state(job))
    arrays = {name: array for name, array in checkpoint.arrays.items() if name != "square:w1"}
    with pytest.raises(DataError, match="square:w1 is missing"):
        to_state(replace(checkpoint, arrays=arrays), job)


def test_the_validation_score_comes_back(tmp_path: Path, raw: dict[str, Any]) -> None:
    job = resolve(raw)
    score = Score(12.5, 11, 20)
    assert to_state(kept(tmp_path, raw, random_state(job, validation=score)), job).validation == score


def test_the_restored_vectors_may_be_written(tmp_path: Path, raw: dict[str, Any]) -> None:
    job = resolve(raw)
    back = to_state(kept(tmp_path, raw, random_state(job)), job)
    for array in (back.weights, *(own.vectors for own in back.optimizers.values())):
        array += 1


def test_arrays_have_the_names_of_the_network(tmp_path: Path, raw: dict[str, Any]) -> None:
    """Other programs read the weights by these, and by safetensors alone."""
    arrays = kept(tmp_path, raw, random_state(resolve(raw))).arrays
    assert {"velocity:w0", "velocity:w1"} < arrays.keys()
    assert sum(name.startswith("conv1") for name in arrays) == 2
    assert sum(name.startswith("batchnorm1") for name in arrays) == 4  # scale, shift; mean, variance


def test_a_checkpoint_says_what_the_images_are(tmp_path: Path, raw: dict[str, Any]) -> None:
    facts = facts_of(kept(tmp_path, raw, random_state(resolve(raw))))
    dataset = open_dataset(raw["data"]["path"])
    assert (facts.classes, facts.shape, facts.labels) == (CLASSES, (8, 8, 3), "classes")
    assert facts.dtype == np.uint8
    np.testing.assert_array_equal(facts.mean, dataset.mean)
    np.testing.assert_array_equal(facts.deviation, dataset.deviation)


def other_networks() -> list[tuple[str, dict[str, Any]]]:
    wider = [{"layer": "conv", "kernels": 5, "size": 3, "pad": 1}, *LAYERS[1:]]
    longer = [*LAYERS[:-1], {"layer": "dense", "units": 12}, *LAYERS[-1:]]
    return [
        ("conv1", {"layers": wider}),
        ("dense1", {"layers": longer}),
        ("conv1", {"layers": LAYERS, "dtype": "float64"}),
        ("maxpool|conv1", {"name": "4:4"}),
    ]


@pytest.mark.parametrize(("name", "model"), other_networks())
@pytest.mark.parametrize("read", [to_state, to_classifier])
def test_the_checkpoint_of_another_network_is_refused(
    tmp_path: Path, raw: dict[str, Any], read: Any, name: str, model: dict[str, Any]
) -> None:
    checkpoint = kept(tmp_path, raw, random_state(resolve(raw)))
    other: Job = resolve(raw | {"model": model})
    with pytest.raises(DataError, match=name) as caught:
        read(checkpoint, other)
    assert str(checkpoint.path) in str(caught.value)
    assert "use the job and the checkpoint of one run" in str(caught.value)


def test_a_missing_array_is_named(tmp_path: Path, raw: dict[str, Any]) -> None:
    job = resolve(raw)
    checkpoint = kept(tmp_path, raw, random_state(job))
    name = next(name for name in checkpoint.arrays if name.startswith("dense1"))
    lacking = replace(checkpoint, arrays={n: a for n, a in checkpoint.arrays.items() if n != name})
    with pytest.raises(DataError, match=f"{name} is missing"):
        to_state(lacking, job)


@pytest.mark.parametrize(
    "change", [{"shape": [8, 8]}, {"shape": "8x8"}, {"mean": None}, {"deviation": "x"}, {"classes": 3}, {"fit": "x"}]
)
def test_a_damaged_description_of_the_images_is_refused(change: dict[str, Any]) -> None:
    facts = Facts(CLASSES, (8, 8, 3), np.arange(3.0), np.full(3, 60.0), fit="pad")
    record = json.loads(json.dumps(facts.to_dict()))
    assert Facts.from_dict(record).to_dict() == record
    with pytest.raises(DataError, match="description of the images is damaged"):
        Facts.from_dict(record | change)
    with pytest.raises(DataError, match="description of the images is damaged"):
        facts_of(Checkpoint({}, {}, 0))
