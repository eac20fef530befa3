"""From raw tables (TOML files, flags, `--set section.key=value`) to a checked job with its defaults filled in.

Each problem is a line: `key = value: reason; because`, or `unknown key` with the nearest right one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from daskcnn.documents import parse_toml, reason_of
from daskcnn.errors import DataError, JobError, all_known, similar
from daskcnn.files import read_regular
from daskcnn.job.checks import contradictions, most_increments
from daskcnn.job.data_table import BUILT_IN, Data
from daskcnn.job.dataset import USUAL_INCREMENTS, usual_augment
from daskcnn.job.elsewhere import meant_key
from daskcnn.job.own_members import modules_of
from daskcnn.job.shorthand import is_module, listed
from daskcnn.job.tables import LAYER, Job, Model, NoRule, Run, Train, keys_of
from daskcnn.modules import import_modules, import_plugins, look_in
from daskcnn.nn.metrics import module_of
from daskcnn.nn.spec import expand
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES, UpdateRule

_MOST_BYTES = 128 << 10


def read_job_file(path: str | Path, most: int = _MOST_BYTES, what: str = "a job file") -> dict[str, Any]:
    """Return the tables of a TOML job file, or of another file. Raises JobError where it cannot be read or parsed."""
    look_in(Path(path).absolute().parent)
    try:
        return parse_toml(read_regular(path, most))
    except DataError as error:
        raise JobError([str(error)]) from error
    except OSError as error:
        raise JobError([f"{path}: {error.strerror}; give the path of {what}"]) from error
    except ValueError as error:
        raise JobError([f"{path}: not a TOML file: {error}"]) from error


def parse_value(text: str) -> Any:
    """Return a flag's value as TOML reads it: numbers, booleans, arrays, tables; anything else is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, date | time) else value  # 2026-11-20 is a name, as no key is a date


def override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in the raw tables. Raises JobError where `key` has no section, or lies in what is no table."""
    *tables, name = key.split(".")
    if not tables or "" in (*tables, name):
        raise JobError([f"--set {key}: write section.key=value, for example train.epochs=5"])
    table = raw
    for i, part in enumerate(tables, 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            above = ".".join(tables[:i])
            raise JobError([f"{key} = {value!r}: {above} is {table!r}, which has no keys to set; set {above} instead"])
    table[name] = value


def apply_settings(raw: dict[str, Any], settings: Iterable[str]) -> None:
    """Set keys of the raw tables, each written "section.key=value". Raises JobError as `override` does."""
    for setting in settings:
        key, given, text = setting.partition("=")
        if not given:
            raise JobError([f"--set {setting}: write section.key=value, for example train.epochs=5"])
        override(raw, key.strip(), parse_value(text.strip()))


def refusals(error: ValidationError, strategy: str | None) -> Iterator[str]:
    """Yield a line for each problem that the models found in a job. strategy: the one whose rule `[rule]` is.

    The keys of a table are listed once, however many unknown ones it has.
    """
    told: set[tuple[str, ...]] = set()
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        key, value = ".".join(loc), f"{item['input']!r:.80}"
        if item["type"] == "extra_forbidden":
            yield f"{key}: {_unknown(loc, strategy, told)}"
        elif item["type"] in ("model_type", "dict_type"):
            yield f"{key} = {value}: write a table of keys"
        else:
            field = _keys(_table(loc[:-1], strategy)).get(loc[-1])
            extra = field.json_schema_extra if field else None  # the field's own reason for its bounds
            because = f"; {extra['because']}" if isinstance(extra, dict) and "because" in extra else ""
            yield f"{key} = {value}: {reason_of(item)}{because}"


def _unknown(loc: list[str], strategy: str | None, told: set[tuple[str, ...]]) -> str:
    """Return the reason why there is no such key, and the key that is meant: of the one section that has it, or near.

    told : the tables whose keys were told; this one is added.
    """
    if loc[0] == "rule" and strategy == LAYER:
        return f"strategy {LAYER!r} has no rule; remove it"
    table, name = tuple(loc[:-1]), loc[-1]
    homes = [f"{s}.{name}" for s, f in Job.model_fields.items() if name in _keys(f.annotation)]
    meant = homes[0] if len(homes) == 1 else meant_key(name, ".".join(table))
    hint = f"; did you mean {meant!r}?" if meant else similar(name, _keys(_table(loc[:-1], strategy)))
    if not hint and table not in told:
        hint = all_known(_keys(_table(loc[:-1], strategy)))
        told.add(table)
    return f"unknown {'key' if table else 'section'}{hint}"


def _keys(table: Any) -> dict[str, FieldInfo]:
    return keys_of(table) if isinstance(table, type) and issubclass(table, BaseModel) else {}


def _table(names: list[str], strategy: str | None) -> type[BaseModel] | None:
    """Return the model of the table at this place; None for what has no model."""
    model: Any = Job
    for i, name in enumerate(names):
        if i == 0 and name == "rule":
            model = RULES.get(strategy or "", NoRule)
            continue
        field = _keys(model).get(name)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
    found: type[BaseModel] = model
    return found


MOST_ENTRIES = 20_000
"""Keys and values of a job: room for networks of thousands of layers. Each may be a problem to be told of."""


def resolve(raw: Mapping[str, Any]) -> Job:
    """Return the job with every default that needs no data set (others: `job.dataset.on_data`). Raises JobError."""
    job = parse_job(raw)
    update: dict[str, Any] = {
        "data": resolved_data(job.data),
        "model": _resolved_model(job.model),
        "train": resolved_train(job),
    }
    if job.rule is not None and job.train.replica_size > 1:
        update["rule"] = job.rule.for_groups()
    job = job.model_copy(update=update)
    return job.model_copy(update={"run": _resolved_run(job)})


def parse_job(raw: Mapping[str, Any]) -> Job:
    """Return the job that the tables describe, as far as they do. Raises JobError with every problem found.

    What is refused by itself is left out, so that the rest of the job is checked too.
    """
    _check_form(raw)
    _import_members(raw)
    problems: list[str] = []
    wrong: set[tuple[int | str, ...]] = set()
    job = None
    while job is None:  # a rule is checked once its strategy is known: each pass leaves out what the one before refused
        try:
            job = Job.model_validate(raw)
        except ValidationError as error:
            train = raw.get("train", {})
            strategy = train.get("strategy", Train().strategy) if isinstance(train, Mapping) else None
            problems += refusals(error, strategy if isinstance(strategy, str) else None)
            refused = {item["loc"][:2] for item in error.errors()}
            if refused <= wrong:  # the pass before could not leave it out
                raise JobError(problems) from error
            wrong |= refused
            raw = _without(raw, wrong | ({("rule",)} if ("train", "strategy") in wrong else set()))
    problems += contradictions(job, wrong)
    if problems:
        raise JobError(problems)
    return job


def _import_members(raw: Mapping[str, Any]) -> None:
    """Import what adds to the registries that the job's names are looked for in. Raises JobError."""
    import_plugins()
    wanted = {"run.imports": _texts(raw, "run", "imports")}
    wanted["train.metrics"] = [module_of(name) for name in _texts(raw, "train", "metrics")]
    for key, modules in wanted.items():
        try:
            import_modules(name for name in modules if is_module(name))
        except DataError as error:
            raise JobError([f"{key} = {error.value!r}: {error.reason}; {error.remedy}"]) from error


def _texts(raw: Mapping[str, Any], section: str, key: str) -> list[str]:
    """Return the texts in a key's list; what else is there is told of with all that is wrong."""
    table = raw.get(section)
    found = listed(table.get(key)) if isinstance(table, Mapping) else None
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _check_form(raw: Mapping[str, Any]) -> None:
    """Raise JobError for keys that are no text, and for too many keys and values, at all depths."""
    waiting: list[Any] = [raw]
    found = 0
    wrong: list[str] = []
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, Mapping):
            wrong += [f"the key {key!a:.80} is no text in UTF-8; write a string" for key in inner if not _is_text(key)]
            inner = list(inner.values())
        found += len(inner)
        if found > MOST_ENTRIES:
            raise JobError([f"{found:,} keys and values: a job has at most {MOST_ENTRIES:,}; give a job file"])
        waiting += [value for value in inner if isinstance(value, Mapping | list | tuple)]
    if wrong:
        raise JobError(wrong)


def _is_text(key: Any) -> bool:
    """Return True for a string that UTF-8 has. An argument of another encoding is none."""
    return isinstance(key, str) and not any("\ud800" <= character <= "\udfff" for character in key)


def _without(raw: Mapping[str, Any], wrong: set[tuple[int | str, ...]]) -> dict[str, Any]:
    """Return the raw tables without these sections and keys."""
    return {
        section: {key: value for key, value in table.items() if (section, key) not in wrong}
        if isinstance(table, Mapping)
        else table
        for section, table in raw.items()
        if (section,) not in wrong
    }


def resolved_data(data: Data) -> Data:
    """Return the table with an absolute path, or the usual one, and the augmentation that suits the data set.

    Without a name the store at the path is yet to say both.
    """
    if data.in_place:
        places = {key: getattr(data, key) for key in ("images", "labels", "test_images", "test_labels")}
        absolute = {key: at if at is None or "://" in at else str(Path(at).absolute()) for key, at in places.items()}
        test = data.test if data.test is not None or data.test_images is not None else 0.2
        augment = "none" if data.augment is None else data.augment
        return data.model_copy(update={**absolute, "test": test, "augment": augment})
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
    """Return the table with all layers written out, and an absolute path of the run to start from."""
    if model.blocks is not None or model.layers is not None:
        layers, _ = expand(model.layers or [], model.blocks or {})
        model = model.model_copy(update={"layers": layers or None, "blocks": None})
    if model.from_ is not None:
        return model.model_copy(update={"from_": str(Path(model.from_).absolute())})
    return model


def _resolved_run(job: Job) -> Run:
    """Return the table with the modules of all members of a user's own that the job names."""
    given = job.run.imports or []
    covered = {name.partition(".")[0] for name in given}
    found = dict.fromkeys(name for name in modules_of(job) if name.partition(".")[0] not in covered)
    return job.run.model_copy(update={"imports": [*given, *found] or None})


def resolved_train(job: Job) -> Train:
    """Return the table with the partitioner and increments, if the job has a rule."""
    train, rule = job.train, job.rule
    # nothing to look ahead with; of another optimizer it is no key
    looks_ahead = train.nesterov and (train.momentum > 0 or train.optimizer.name != "sgd")
    update: dict[str, Any] = {} if looks_ahead else {"nesterov": False}
    if rule is not None:
        update |= {"partition": _partition(train), "increments": train.increments or _usual_increments(train, rule)}
    return train.model_copy(update=update)


def _partition(train: Train) -> str:
    return train.partition or "idpa"


def _usual_increments(train: Train, rule: UpdateRule) -> int:
    at_once = PARTITIONERS[_partition(train)].at_once or rule.swaps  # increments would be rounds of their own
    return 1 if at_once else min(USUAL_INCREMENTS, most_increments(train.epochs))


def changed(job: Job, **train: Any) -> dict[str, Any]:
    """Return a resolved job's tables with these keys of `[train]`, without defaults that went with their old values.

    The values are not checked.
    """
    tables = job.model_dump(mode="json")
    before, filled_in = tables["train"], dict[str, Any]()
    new = {key for key, value in train.items() if value != before[key]}
    if "strategy" in new:
        tables["rule"] = {}
    elif "lr" in new:
        tables["rule"].pop("lower_lr", None)
    if train.get("strategy") == LAYER:  # every worker sees every sample
        filled_in |= {"partition": None, "increments": None}
    elif job.rule is not None and before["increments"] == _usual_increments(job.train, job.rule):
        filled_in |= {"increments": None} if new & {"strategy", "partition", "epochs"} else {}
    if train.get("momentum") == 0:
        filled_in["nesterov"] = False
    epochs, schedule = train.get("epochs"), before["schedule"]
    if isinstance(epochs, int) and 0 < epochs <= schedule["warmup"]:
        filled_in["schedule"] = {**schedule, "warmup": epochs / 4}
    return {**tables, "train": {**before, **filled_in, **train}}


def turned(job: Job, strategy: str, size: int) -> Job:
    """Return a job that chooses its strategy with the one that it has chosen. size: workers of a replica.

    Raises JobError where the job has keys that do not go with it.
    """
    return resolve(changed(job, strategy=strategy, replica_size=size))
