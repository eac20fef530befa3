"""A trained network as one safetensors file: the weights by name, and a description of the model in its metadata.

The metadata are strings, each of them JSON:

format     "daskcnn 1"
layers     the layers as a job's `model.layers` has them
dtype      number type of weights and activations
images     `Facts.to_dict`: classes, shape, mean, deviation and what else describes the images
loss       the loss that it was trained with
imports    modules that its layers are from, if they are not all daskcnn's; a reader never imports them by itself
run        name of the run, for people
version    of daskcnn

A file may come from anywhere. Header and metadata are bounded. The arrays' shapes are compared with the layers before
anything as large as the network is allocated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from safetensors.numpy import save as encode

from daskcnn.documents import Bounds, parse_json
from daskcnn.errors import DataError, JobError, nearest
from daskcnn.export.trained_layers import version
from daskcnn.files import open_regular, output_file, replace_file
from daskcnn.job.network import layout_of, loss_of, network_of
from daskcnn.job.own_members import layers_in
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.modules import import_plugins
from daskcnn.nn import leaves
from daskcnn.nn.layers import LAYERS
from daskcnn.nn.spec import spec_of
from daskcnn.runs.checkpoint import BOUNDS, read_arrays, read_header
from daskcnn.store.image_facts import Facts
from daskcnn.store.manifest import MOST_CLASSES
from daskcnn.training.trained_network import Classifier

FORMAT = "daskcnn 1"
REMEDY = "export the model again with `daskcnn export RUN --to safetensors`"
_KEYS = ("format", "layers", "dtype", "images", "loss")  # those that reading needs
_LONGEST = 1000  # letters of the names of modules
_HEADER = replace(BOUNDS, size=20 << 20)
_BOUNDS = Bounds(size=4 << 20, values=50_000, tables=20_000)
_IMAGES = Bounds(size=16 << 20, values=MOST_CLASSES + 50_000, tables=10)  # names of 250 bytes, means, deviations


def write_model(classifier: Classifier, run: str, out: Path) -> tuple[Path, ...]:
    """Write the model and return the file. Raises OSError."""
    arrays = {name: a for tree in classifier.layout.views(classifier.weights) for name, a in leaves(tree)}
    metadata = {
        "format": FORMAT,
        "layers": spec_of(classifier.model),
        "dtype": classifier.job.model.dtype,
        "images": classifier.facts.to_dict(),
        "loss": classifier.job.train.loss,
        "imports": classifier.job.run.imports,
        "run": run,
        "version": version(),
    }
    replace_file(output_file(out), encode(arrays, {key: json.dumps(value) for key, value in metadata.items()}))
    return (out,)


def read_model(path: str | Path) -> Classifier:
    """Return the model in a file that `write_model` wrote.

    Raises DataError for a file that is none, is damaged, or declares other shapes than its layers have; and JobError
    for a network that this machine has too little memory for.
    """
    file = Path(path)
    try:
        with open_regular(file) as source:
            size = os.fstat(source.fileno()).st_size
            header, metadata = read_header(source, file, size, remedy=REMEDY, bounds=_HEADER)
            job, facts = _described(metadata, file)
            stored = sum(prod(array.shape) for array in header.values())
            if stored != (wanted := _numbers(job, facts, file)):
                raise _damaged(file, f"{stored:,} weights, its layers have {wanted:,}")
            arrays = read_arrays(source, header, size)
    except OSError as error:
        raise DataError(file, error.strerror or error, "give a model that `daskcnn export` wrote") from error
    layout = layout_of(job, facts)
    weights = np.empty(layout.size, layout.dtype)
    for tree in layout.views(weights):
        for name, view in leaves(tree):
            found = arrays.pop(name, None)
            if found is None or found.shape != view.shape or found.dtype != view.dtype:
                has = "is missing" if found is None else f"is {found.dtype}{found.shape}"
                raise _damaged(file, f"{name} {has}, its layers want {view.dtype}{view.shape}")
            view[...] = found
    return Classifier(job, facts, weights)


def _described(metadata: Mapping[str, str], file: Path) -> tuple[Job, Facts]:
    """Return the job that makes the network, as far as it matters to a trained one, and its images."""
    if "format" not in metadata or "layers" not in metadata:
        raise DataError(file, "not a model of daskcnn (its metadata name no layers)", REMEDY)
    given = {key: metadata[key].encode(errors="replace") for key in _KEYS if key in metadata}
    found = {
        key: parse_json(text, f"{file}: {key}", remedy=REMEDY, bounds=_IMAGES if key == "images" else _BOUNDS)
        for key, text in given.items()
    }
    if found["format"] != FORMAT:
        raise DataError(file, f"format {found['format']!r:.80}, this version reads {FORMAT!r}", REMEDY)
    if not isinstance(found["layers"], list) or not isinstance(found.get("images"), dict):
        raise _damaged(file, "its metadata describe no layers and images")
    model = {"layers": found["layers"], "dtype": found.get("dtype")}
    import_plugins()
    if unknown := sorted(set(layers_in(found["layers"])) - LAYERS.keys()):
        raise _of_other_modules(file, unknown[0], metadata.get("imports", ""))
    try:
        job = resolve({"model": model, "train": {"loss": found.get("loss")}})
        facts = Facts.from_dict(found["images"])
        loss_of(job, facts)
        return job, facts
    except JobError as error:
        raise _damaged(file, "; ".join(error.problems[:3])) from error
    except DataError as error:
        raise _damaged(file, error.reason) from error


def _of_other_modules(file: Path, layer: str, imports: str) -> DataError:
    """Return the refusal of a layer that nothing has registered. A file may come from anywhere: it imports nothing."""
    named = re.findall(r"[\w.]+", imports if len(imports) < _LONGEST else "")
    modules = " ".join(f"--import {name}" for name in named if name != "null")
    remedy = f"import the module that adds it, if you trust it: {modules or '--import MODULE'}, `import` in Python"
    return DataError(file, f"layer {layer!r:.60}: there is none of this name{nearest(layer, LAYERS)}", remedy)


def _numbers(job: Job, facts: Facts, file: Path) -> int:
    try:
        return network_of(job, facts).numbers(facts.shape)
    except ValueError as error:
        raise _damaged(file, f"its layers do not fit its images: {error}") from error


def _damaged(file: Path, what: str) -> DataError:
    return DataError(file, f"a damaged model ({what})", REMEDY)
