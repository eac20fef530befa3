"""The job: frozen models of every key a job file may hold. Unknown keys are refused; all problems come at once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from daskcnn.errors import JobError


class Options(BaseModel):
    """A table of options: immutable, typed, no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Options):
    """`[data]`: which samples. `validation` samples come off the end of the training part and are never trained on."""

    name: str = "synthetic"
    path: str | None = None
    archive: str | None = None
    order: Literal["shuffled", "stored"] = "shuffled"
    validation: int = Field(2000, ge=1)
    augment: Literal["none", "crop-mirror"] | None = None  # None: what suits the data set
    limit: int | None = Field(None, ge=1)


class Model(Options):
    """`[model]`: a network by name or as a list of layers. `relu = false` gives `C1:C2` as the papers list it."""

    name: str | None = None
    layers: tuple[dict[str, Any], ...] | None = Field(None, min_length=1)
    dtype: Literal["float32", "float64"] = "float32"
    relu: bool = True


class Schedule(Options):
    """How the learning rate falls: `constant`, `step` (times `factor` every `every` epochs) or `poly` (`power`)."""

    name: Literal["constant", "step", "poly"] = "poly"
    every: float = Field(10.0, gt=0)
    factor: float = Field(0.1, gt=0, le=1)
    power: float = Field(1.0, gt=0)


def _named_schedule(value: Any) -> Any:
    """Let `schedule = "step"` stand for `{name = "step"}`; `linear` is the polynomial of power 1."""
    if value == "linear":
        return {"name": "poly", "power": 1.0}
    return {"name": value} if isinstance(value, str) else value


class Train(Options):
    """`[train]`: how. `early_stopping` counts epochs without a better validation accuracy."""

    strategy: str = "sgwu"
    partition: str | None = None
    increments: int | None = Field(None, ge=1)
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(128, ge=1)
    lr: float = Field(0.02, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = True
    weight_decay: float = Field(1e-3, ge=0)
    schedule: Annotated[Schedule, BeforeValidator(_named_schedule)] = Schedule()
    loss: Literal["softmax", "squared"] = "softmax"
    seed: int = Field(0, ge=0, lt=2**63)
    threads: int | None = Field(None, ge=1)
    replica_size: int = Field(1, ge=1)
    early_stopping: int | None = Field(None, ge=1)


class Workers(Options):
    """How many workers of each kind the job waits for and uses. Nothing given: every worker there is."""

    cpu: int | None = Field(None, ge=0)
    gpu: int | None = Field(None, ge=0)

    @property
    def given(self) -> dict[str, int]:
        """Workers wanted of each kind that was named; empty where none was."""
        return {kind: n for kind, n in (("cpu", self.cpu), ("gpu", self.gpu)) if n is not None}


def _counted_workers(value: Any) -> Any:
    """Read the flag's form `cpu=2,gpu=1`; anything else is left to the model."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",")]
    return {kind.strip(): count.strip() for kind, _, count in pairs}


class Cluster(Options):
    """`[cluster]`: where. Without a scheduler a local cluster starts. `wait` and `stall_timeout` are seconds."""

    scheduler: str | None = None
    scheduler_file: str | None = None
    workers: Annotated[Workers, BeforeValidator(_counted_workers)] = Workers()
    wait: float = Field(60.0, ge=0)
    stall_timeout: float = Field(300.0, gt=0)
    wire: Literal["float32", "float16"] = "float32"


class Run(Options):
    """`[run]`: where results go. `checkpoint_every` is in epochs; `keep` newest checkpoints stay, and the best."""

    dir: str = "runs"
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    checkpoint_every: float = Field(1.0, gt=0)
    keep: int = Field(3, ge=1)


class Job(Options):
    """One training job, resolved and checked. `rule` holds the chosen rule's own parameters."""

    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    rule: dict[str, Any] = Field(default_factory=dict)
    cluster: Cluster = Cluster()
    run: Run = Run()


SECTIONS: dict[str, type[Options]] = {
    "data": Data, "model": Model, "train": Train, "cluster": Cluster, "run": Run,
}  # fmt: skip


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known word, or the list of them where none is close."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML job file. Raises JobError where it cannot be read or parsed."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError([f"{path}: {error.strerror}; give the path of a job file"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError([f"{path}: not a TOML file: {error}"]) from error


def parse_value(text: str) -> Any:
    """A flag's value as TOML would read it: numbers, booleans, arrays, tables; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in the raw tables. Raises JobError where `key` has no section."""
    section, _, name = key.partition(".")
    if not name:
        raise JobError([f"--set {key}: write section.key=value, for example train.epochs=5"])
    table = raw.setdefault(section, {})
    for part in name.split(".")[:-1]:
        table = table.setdefault(part, {}) if isinstance(table, dict) else {}
    if isinstance(table, dict):
        table[name.split(".")[-1]] = value


def parse_job(
    raw: Mapping[str, Any],
    *,
    rules: Mapping[str, type[BaseModel]],
    choices: Mapping[str, Iterable[str]],
    network_problems: Callable[[Model], Iterable[str]],
) -> Job:
    """Check the raw tables against the models, the rules' own parameters and the registries (`section.key` → names).

    Raises JobError with every problem found, those that `network_problems` sees in `[model]` among them.
    """
    problems = [
        f"[{name}]: no such section{nearest(name, [*SECTIONS, 'rule'])}"
        for name in raw
        if name not in SECTIONS and name != "rule"
    ]
    tables: dict[str, Options] = {}
    for name, section in SECTIONS.items():
        try:
            tables[name] = section.model_validate(raw.get(name, {}))
        except ValidationError as error:
            problems += _readable(error, name, section)
    problems += _unknown_choices(tables, choices)
    problems += _rule_problems(raw.get("rule", {}), tables.get("train"), rules)
    problems += _contradictions(tables)
    match tables.get("model"):
        case Model() as model_table:
            problems += network_problems(model_table)
    if problems:
        raise JobError(problems)
    return Job(**tables, rule=dict(raw.get("rule", {})))


def _readable(error: ValidationError, section: str, model: type[BaseModel]) -> Iterator[str]:
    for item in error.errors():
        key = ".".join([section, *map(str, item["loc"])])
        if item["type"] == "extra_forbidden":
            known = model.model_fields if len(item["loc"]) == 1 else _inner_fields(model, item["loc"])
            yield f"{key}: unknown key{nearest(str(item['loc'][-1]), known)}"
        else:
            yield f"{key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _inner_fields(model: type[BaseModel], loc: tuple[int | str, ...]) -> Iterable[str]:
    inner = model.model_fields[str(loc[0])].annotation
    return inner.model_fields if isinstance(inner, type) and issubclass(inner, BaseModel) else ()


def _unknown_choices(tables: Mapping[str, Options], choices: Mapping[str, Iterable[str]]) -> Iterator[str]:
    for key, known in choices.items():
        section, name = key.split(".")
        value = getattr(tables.get(section), name, None)
        if value is not None and value not in (names := list(known)):
            yield f"{key} = {value!r}: no such {name}{nearest(value, names)}"


def _rule_problems(table: Any, train: Options | None, rules: Mapping[str, type[BaseModel]]) -> Iterable[str]:
    if not isinstance(table, Mapping):
        return [f"[rule] = {table!r}: write a table of the rule's parameters"]
    if not isinstance(train, Train):
        return []
    if train.strategy not in rules:
        return [f"rule.{key}: strategy {train.strategy!r} has no rule; remove it" for key in table]
    try:
        rules[train.strategy].model_validate(dict(table))
    except ValidationError as error:
        return _readable(error, "rule", rules[train.strategy])
    return []


def _contradictions(tables: Mapping[str, Options]) -> Iterator[str]:
    match tables.get("model"):
        case Model(name=str(), layers=tuple()):
            yield "model.name and model.layers: each describes the network; keep one"
    match tables.get("cluster"):
        case Cluster(scheduler=str(), scheduler_file=str()):
            yield "cluster.scheduler and cluster.scheduler_file: each names the scheduler; keep one"
    match tables.get("cluster"):
        case Cluster(workers=workers) if workers.given and not any(workers.given.values()):
            yield "cluster.workers = 0: a run needs at least one; raise cpu or gpu"
    match tables.get("train"):
        case Train() as train:
            yield from _training_contradictions(train)


def _training_contradictions(train: Train) -> Iterator[str]:
    given = train.model_fields_set
    if train.strategy == "layer":
        for key in ("partition", "increments", "replica_size"):
            if key in given:
                yield f"train.{key}: strategy 'layer' is one replica that sees every sample; remove it"
    elif train.replica_size > 1:
        yield f"train.replica_size = {train.replica_size}: replicas of several workers are not built yet; use 1"
    if train.partition == "udpa" and (train.increments or 1) > 1:
        yield f"train.increments = {train.increments}: partition 'udpa' gives everything at once; remove it or use idpa"
    if train.increments is not None and train.increments > 2 * train.epochs - 1:
        yield (
            f"train.increments = {train.increments}: {train.epochs} epochs end before the last increment is given; "
            f"use at most {2 * train.epochs - 1} or more epochs"
        )
    if train.nesterov and "nesterov" in given and train.momentum == 0:
        yield "train.nesterov = true: needs a momentum above 0; set train.momentum or remove it"
