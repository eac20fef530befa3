"""From raw tables to a job that is right by itself and says everything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from daskcnn.errors import JobError
from daskcnn.job.checks import contradictions
from daskcnn.job.refusals import refusals
from daskcnn.job.tables import BUILT_IN, Data, Job, Model, Train
from daskcnn.job.usual import USUAL_INCREMENTS, usual_augment
from daskcnn.nn.blocks import expand
from daskcnn.partition import PARTITIONERS

MOST_ENTRIES = 20_000
"""Keys and values of a job: room for networks of thousands of layers. Each may be a problem to be told of."""

Keys = set[tuple[int | str, ...]]


def resolve(raw: Mapping[str, Any]) -> Job:
    """The job with every default that needs no data set (`job.usual.on_data`). Raises JobError with all problems."""
    job = parse_job(raw)
    update = {"data": resolved_data(job.data), "model": _resolved_model(job.model), "train": _resolved_train(job)}
    return job.model_copy(update=update)


def parse_job(raw: Mapping[str, Any]) -> Job:
    """The job that the tables describe, as far as they do. Raises JobError with every problem found.

    What is refused by itself is left out, so that the rest of the job is checked too.
    """
    if (most := _entries(raw)) > MOST_ENTRIES:
        raise JobError([f"{most:,} keys and values: a job has at most {MOST_ENTRIES:,}; give a job file"])
    job, problems, wrong = _validated(raw)
    problems += contradictions(job, wrong)
    if problems:
        raise JobError(problems)
    return job


def _entries(raw: Mapping[str, Any]) -> int:
    """How many keys and values the tables hold, at all depths; counted as far as the most and one table more."""
    waiting: list[Any] = [raw]
    found = 0
    while waiting and found <= MOST_ENTRIES:
        inner = waiting.pop()
        inner = list(inner.values()) if isinstance(inner, Mapping) else inner
        found += len(inner)
        waiting += [value for value in inner if isinstance(value, Mapping | list | tuple)]
    return found


def _validated(raw: Mapping[str, Any]) -> tuple[Job, list[str], Keys]:
    """The job of what the models accept; what they refuse, in words and as keys."""
    problems: list[str] = []
    wrong: Keys = set()
    while True:  # a rule is checked once its strategy is known: each pass leaves out what the one before refused
        try:
            return Job.model_validate(raw), problems, wrong
        except ValidationError as error:
            problems += refusals(error, _strategy(raw))
            wrong |= {item["loc"][:2] for item in error.errors()}
            raw = _without(raw, wrong | ({("rule",)} if ("train", "strategy") in wrong else set()))


def _strategy(raw: Mapping[str, Any]) -> str | None:
    """The strategy that the tables name, or the default; None where they name none that can be one."""
    train = raw.get("train", {})
    strategy = train.get("strategy", Train().strategy) if isinstance(train, Mapping) else None
    return strategy if isinstance(strategy, str) else None


def _without(raw: Mapping[str, Any], wrong: Keys) -> dict[str, Any]:
    """The raw tables less these sections and keys."""
    return {
        section: {key: value for key, value in table.items() if (section, key) not in wrong}
        if isinstance(table, Mapping)
        else table
        for section, table in raw.items()
        if (section,) not in wrong
    }


def resolved_data(data: Data) -> Data:
    """The same with an absolute path, or the usual one, and the augmentation that suits the data set.

    Without a name the store at the path is yet to say both.
    """
    if data.in_place:
        return _resolved_arrays(data)
    name = data.name or (None if data.path else BUILT_IN)
    path = data.path or f"data/{name}.zarr"
    return data.model_copy(
        update={
            "name": name,
            "path": path if "://" in path else str(Path(path).absolute()),
            "archive": data.archive and str(Path(data.archive).absolute()),
            "augment": data.augment if data.augment is not None else name and usual_augment(name),
        }
    )


def _resolved_model(model: Model) -> Model:
    """The same with all layers written out, and with an absolute path of the run to start from."""
    if model.blocks is not None or model.layers is not None:
        layers, _ = expand(model.layers or [], model.blocks or {})
        model = model.model_copy(update={"layers": layers or None, "blocks": None})
    if model.from_ is not None:
        return model.model_copy(update={"from_": str(Path(model.from_).absolute())})
    return model


def _resolved_arrays(data: Data) -> Data:
    places = {key: getattr(data, key) for key in ("images", "labels", "test_images", "test_labels")}
    absolute = {key: at if at is None or "://" in at else str(Path(at).absolute()) for key, at in places.items()}
    test = data.test if data.test is not None or data.test_images is not None else 0.2
    augment = "none" if data.augment is None else data.augment
    return data.model_copy(update={**absolute, "test": test, "augment": augment})


def _resolved_train(job: Job) -> Train:
    train, rule = job.train, job.rule
    # nothing to look ahead with; of another optimizer it is no key
    looks_ahead = train.nesterov and (train.momentum > 0 or train.optimizer.name != "sgd")
    update: dict[str, Any] = {} if looks_ahead else {"nesterov": False}
    if rule is not None:
        partition = train.partition or "idpa"
        at_once = PARTITIONERS[partition].at_once or rule.swaps  # increments would be rounds of their own
        usual = 1 if at_once else min(USUAL_INCREMENTS, 2 * train.epochs - 1)
        update |= {"partition": partition, "increments": train.increments or usual}
    return train.model_copy(update=update)
