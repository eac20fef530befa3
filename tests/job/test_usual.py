"""What a job trains with where it does not say."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.job.dataset import on_data
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.nn import OPTIMIZERS, build_model

OWN, CIFAR10 = ("photos", (64, 64, 3), 3, 5000), ("cifar10", (32, 32, 3), 10, 50_000)


def resolved(tables: dict[str, Any], data: tuple[str, tuple[int, int, int], int, int] = OWN) -> Job:
    return on_data(resolve({"data": {"path": "x.zarr"}, **tables}), *data)


def made_by(job: Job) -> tuple[str, float, int, float]:
    train = job.train
    return train.optimizer.name, train.lr, train.batch_size, train.schedule.warmup


CAREFUL = ("adamw", 0.003, 32, 1.0)
AS_PUBLISHED = ("sgd", 0.01, 64, 0.0)
STUDIED = ("sgd", 0.02, 64, 0.0)
"""The same for networks that `benchmarks/studies/named_models.py` has found a rate for."""


def test_images_of_one_s_own_are_trained_on_carefully() -> None:
    job = resolved({})
    assert made_by(job) == CAREFUL
    assert (job.model.name, job.data.name, job.data.augment, job.data.validation) == ("quick", "photos", "none", 500)


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        ({}, CIFAR10, STUDIED),
        ({"name": "50:500"}, CIFAR10, AS_PUBLISHED),
        ({"name": "lenet5"}, ("mnist", (28, 28, 1), 10, 60_000), STUDIED),
        ({}, ("mnist", (28, 28, 1), 10, 60_000), CAREFUL),  # `quick` is for 32x32
        ({}, ("own", (32, 32, 3), 10, 50_000), CAREFUL),  # of its size, and of nobody's paper
        ({"layers": [{"layer": "dense", "units": 10}]}, CIFAR10, CAREFUL),
        ({"name": "resnet18"}, CIFAR10, CAREFUL),  # for photographs
    ],
)
def test_networks_of_papers_keep_what_their_papers_say(model: Any, data: Any, expected: Any) -> None:
    assert made_by(resolved({"model": model}, data)) == expected


@pytest.mark.parametrize("data", [OWN, CIFAR10])
def test_what_is_given_stays_as_it_is_even_where_it_is_the_key_s_default(data: Any) -> None:
    given = {"optimizer": "sgd", "lr": 0.01, "batch_size": 64, "schedule": "poly", "strategy": "layer"}
    assert made_by(resolved({"train": given}, data)) == AS_PUBLISHED
    job = resolved({"train": {"lr": 0.3}, "data": {"path": "x.zarr", "validation": 2000}}, data)
    assert (job.train.lr, job.data.validation) == (0.3, 2000)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_has_a_rate_of_its_own(name: str) -> None:
    assert resolved({"train": {"optimizer": name}}).train.lr == OPTIMIZERS[name].usual_rate


def test_a_rule_that_takes_back_a_part_of_every_step_makes_longer_ones() -> None:
    assert resolved({"train": {"strategy": "easgd"}}).train.lr == 0.006
    assert resolved({"train": {"strategy": "layer"}}).train.lr == 0.003


@pytest.mark.parametrize("strategy", ["downpour", "dc-asgd"])
def test_rules_that_add_up_what_replicas_gain_make_shorter_steps_unless_a_rate_is_given(strategy: str) -> None:
    """On their own images three workers of `downpour` stayed at chance with the rate of one."""

    def rates(train: dict[str, Any], rule: dict[str, Any]) -> list[float]:
        own = resolved({"train": {"strategy": strategy, **train}, "rule": rule}).rule
        assert own is not None
        return [own.rate(k, 0.5) for k in (1, 2, 4)]

    assert rates({}, {}) == [1, 0.5, 0.125]
    assert strategy != "downpour" or rates({}, {"server": "adagrad"}) == [1, 1, 1]
    assert rates({"lr": 0.003}, {}) == rates({}, {"lower_lr": False}) == [1, 1, 1]


@pytest.mark.parametrize("key", [{"momentum": 0.9}, {"nesterov": False}])
def test_a_key_that_only_sgd_has_makes_it_sgd(key: dict[str, Any]) -> None:
    assert made_by(resolved({"train": key})) == ("sgd", 0.005, 32, 1.0)


@pytest.mark.parametrize(("samples", "batch"), [(40, 8), (220, 8), (230, 16), (1111, 16), (1120, 32)])
def test_few_samples_make_small_minibatches(samples: int, batch: int) -> None:
    assert resolved({}, ("photos", (64, 64, 3), 3, samples)).train.batch_size == batch


@pytest.mark.parametrize(("samples", "increments"), [(2, 1), (4, 3), (5, 4), (600, 4)])
def test_few_samples_are_given_out_in_few_increments(samples: int, increments: int) -> None:
    assert resolved({}, ("photos", (64, 64, 3), 3, samples)).train.increments == increments


@pytest.mark.parametrize(("samples", "held_out"), [(2, 1), (14, 1), (600, 60), (20_000, 2000), (50_000, 2000)])
def test_a_tenth_is_for_validation(samples: int, held_out: int) -> None:
    assert resolved({}, ("photos", (64, 64, 3), 3, samples)).data.validation == held_out


@pytest.mark.parametrize("epochs", [1, 2, 3, 8])
def test_a_warm_up_is_a_quarter_of_the_run_at_most(epochs: int) -> None:
    assert resolved({"train": {"epochs": epochs}}).train.schedule.warmup == min(1.0, epochs / 4)


@pytest.mark.parametrize("shape", [(1, 200, 1), (7, 7, 3), (2, 300, 12)])
def test_small_images_have_a_network_that_fits(shape: tuple[int, int, int]) -> None:
    layers = resolved({}, ("spectra", shape, 3, 600)).model.layers
    assert build_model(None, layers, shape, 3).out_shape(shape) == (3,)


def test_a_kept_job_says_everything_and_stays_as_it_is() -> None:
    """Other defaults in a later version change no run that is resumed."""
    for data in (OWN, CIFAR10):
        job = resolved({"train": {"epochs": 2}}, data)
        again = on_data(resolve(job.model_dump(mode="json")), data[0], data[1], data[2], 10 * data[3])
        assert again == job
