"""The data set that a job names, a prepared one or arrays in place, and the job's defaults that depend on it.

A paper's network on the images that it was described for keeps SGD. Everything else is trained by AdamW. The numbers
come from a study: benchmarks/studies/defaults.md.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from daskcnn.job.data_table import Data
from daskcnn.job.tables import Job, Model, OptimizerOptions, Schedule, Train
from daskcnn.nn import OPTIMIZERS
from daskcnn.nn.layer import Shape
from daskcnn.nn.models import described_for, rate_of
from daskcnn.store import DATASETS, Dataset, open_dataset
from daskcnn.store.array_index import ArrayIndex
from daskcnn.store.augmentation import AugmentName
from daskcnn.store.foreign.in_place import Arrays, outline
from daskcnn.store.split import held_out


def arrays_of(data: Data) -> Arrays:
    """Return the arrays in place that a resolved job names."""
    named = {each.name: getattr(data, each.name) for each in fields(Arrays)}
    return Arrays(**named if "validation" in data.model_fields_set else {**named, "validation": None})


def opened(data: Data, index: ArrayIndex | None = None) -> Dataset:
    """Open the data set of a resolved job. Only metadata are read, and the labels of arrays in place.

    index : of arrays in place. Without it they have no statistics, and are not checked as they are read.
    Raises DataError where the data set is missing or wrong.
    """
    if data.in_place:
        return scaled(data, outline(arrays_of(data)).dataset(index))
    assert data.path is not None, "resolved"
    return scaled(data, open_dataset(data.path, limit=data.limit))


def scaled(data: Data, dataset: Dataset) -> Dataset:
    """Return the data set with the job's own mean and deviation, if any. Raises DataError where they do not fit."""
    return dataset if data.scale is None else dataset.scaled(data.scale.mean, data.scale.deviation)


SMALLEST = 8
"""Rows or columns of the smallest images that `quick` is for: it halves them three times."""
BATCHES = ((200, 8), (1000, 16))
"""Most training samples, and the minibatch for so few: more steps an epoch. `BATCH` for all others."""
BATCH, WARMUP = 32, 1.0
USUAL_INCREMENTS = 4
"""Increments where the job names none, if the epochs, the partitioner and the rule allow them."""
FAR = 3.0
"""Times an optimizer's usual rate from which a rate was perhaps meant for another one."""
_OF_SGD = {"momentum", "nesterov"}


def usual_model(model: Model, shape: Shape, classes: int) -> Model:
    """Return the model with a network: its own, that of the run to start from, `quick`, or one for smaller images."""
    if model.name or model.layers or model.from_ is not None:
        return model
    if min(shape[:2]) >= SMALLEST:
        return model.model_copy(update={"name": "quick"})
    conv = {"layer": "conv", "kernels": 32, "size": 3, "pad": 1}
    return model.model_copy(update={"layers": [conv, {"layer": "relu"}, {"layer": "dense", "units": classes}]})


def usual_augment(name: str) -> AugmentName:
    """Return the augmentation that suits a data set: none for one that is not known by its name."""
    return DATASETS[name].augment if name in DATASETS else "none"


def usual_training(job: Job, name: str, shape: Shape, samples: int) -> Train:
    """Return the job's `[train]` on this data set with every default filled in.

    A named network on a published data set of its size keeps what the keys say by themselves, at a rate of its own.
    Everything else is trained by AdamW, in small minibatches, behind a warm-up; keys that only SGD has make the
    optimizer SGD. The learning rate is the optimizer's usual one.
    """
    train, given = job.train, job.train.model_fields_set
    named = job.model.name
    own = rate_of(named) if name in DATASETS and named is not None and described_for(named) == shape else None
    found: dict[str, Any] = {}
    if own is None:
        usual = next((batch for most, batch in BATCHES if samples <= most), BATCH)
        found["batch_size"] = max(usual, train.sub_batches)
        found["schedule"] = Schedule(warmup=min(WARMUP, train.epochs / 4))
        found |= {} if given & _OF_SGD else {"optimizer": OptimizerOptions(name="adamw")}
    update = {key: value for key, value in found.items() if key not in given}
    if 0 < samples < (train.increments or 1) <= USUAL_INCREMENTS:  # very few samples
        update["increments"] = samples
    optimizer = update.get("optimizer", train.optimizer).name
    if "lr" not in given:
        rule = 1.0 if job.rule is None else job.rule.usual_rate
        update["lr"] = own if own is not None and optimizer == "sgd" else OPTIMIZERS[optimizer].usual_rate * rule
    return train.model_copy(update=update)


def doubts(job: Job, found: Train) -> list[str]:
    """Return warnings about values of a given job that look unintended. found: its `[train]` on the data set."""
    usual, given = OPTIMIZERS[found.optimizer.name].usual_rate, job.train.model_fields_set
    if "lr" not in given or "optimizer" in given or found.optimizer.name == "sgd" or found.lr <= FAR * usual:
        return []
    name = found.optimizer.name
    return [
        f"train.lr = {found.lr:g}: large for {name}, which is the default here; {usual:g} is usual, or set optimizer"
    ]


def on_data(job: Job, name: str, shape: Shape, classes: int, samples: int) -> Job:
    """Return the job on the data set of this name, with every default filled in.

    shape : (H, W, C) of its images.
    samples : those of the training part, validation included.
    """
    augment = job.data.augment if job.data.augment is not None else usual_augment(name)
    update: dict[str, Any] = {"name": name, "augment": augment}
    if "validation" not in job.data.model_fields_set:
        update["validation"] = held_out(samples)
    data = job.data.model_copy(update=update)
    job = job.model_copy(update={"data": data, "model": usual_model(job.model, shape, classes)})
    train = usual_training(job, name, shape, samples - data.validation)
    rule = job.rule if job.rule is None or "lr" in job.train.model_fields_set else job.rule.at_usual_rate()
    return job.model_copy(update={"train": train, "rule": rule})
