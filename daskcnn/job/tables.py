"""The job: frozen models of every key a job file may hold. Unknown keys are refused; all problems come at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from daskcnn.errors import JobError

Location = Annotated[str, Field(min_length=1), AfterValidator(expanduser)]


class Options(BaseModel):
    """A table of options: immutable, no unknown keys, no infinities, no value taken for one of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Data(Options):
    """`[data]`: which samples. `validation` samples come off the end of the training part and are never trained on."""

    name: str = "synthetic"
    path: Location | None = None
    archive: Location | None = None
    order: Literal["shuffled", "stored"] = "shuffled"
    validation: int = Field(2000, ge=1)
    augment: Literal["none", "crop-mirror"] | None = None  # None: what suits the data set
    limit: int | None = Field(None, ge=1)


class Model(Options):
    """`[model]`: a network by name or as a list of layers. `relu = false` gives `C1:C2` as the papers list it."""

    name: str | None = None
    layers: list[dict[str, Any]] | None = Field(None, min_length=1)
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
    if isinstance(value, dict | Schedule):
        return value
    if not isinstance(value, str):
        raise ValueError('write a name, or a table such as {name = "step", every = 10}')
    return {"name": "poly", "power": 1.0} if value == "linear" else {"name": value}


FirstConv: TypeAlias = Literal["auto", "kernels", "samples"]


class Train(Options):
    """`[train]`: how. `early_stopping` counts epochs without a better validation accuracy.

    `workspace_mib` is what a layer may take for scratch memory on each worker, in MiB. `replica_size`: workers that
    shard the kernels of one replica. `sub_batches`: parts of a minibatch that these, or strategy `layer`, send on one
    by one. `first_conv`: what of their first convolution they divide, kernels or the samples of a minibatch; auto:
    whichever makes the shorter step.
    """

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
    workspace_mib: int = Field(1024, ge=1)
    replica_size: int = Field(1, ge=1)
    sub_batches: int = Field(1, ge=1)
    first_conv: FirstConv = "auto"
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
    if isinstance(value, dict | Workers):
        return value
    if not re.fullmatch(r"\s*\w+\s*=\s*\d+\s*(,\s*\w+\s*=\s*\d+\s*)*", str(value)):
        raise ValueError("write cpu=2, gpu=1 or cpu=2,gpu=1")
    pairs = (part.split("=") for part in value.split(","))
    return {kind.strip(): int(count) for kind, count in pairs}


class Cluster(Options):
    """`[cluster]`: where. Without a scheduler a local cluster starts. `wait` and `stall_timeout` are seconds.

    `overlap`: under asynchronous rules replicas train on while they push and pull within a round. `ps_shards`: workers
    that the parameter server is split over, each with a range of the vector.
    """

    scheduler: str | None = None
    scheduler_file: Location | None = None
    workers: Annotated[Workers, BeforeValidator(_counted_workers)] = Workers()
    wait: float = Field(60.0, ge=0)
    stall_timeout: float = Field(300.0, gt=0)
    wire: Literal["float32", "float16"] = "float32"
    overlap: bool = True
    ps_shards: int = Field(1, ge=1)


class Run(Options):
    """`[run]`: where results go. `checkpoint_every` is in epochs; `keep` newest checkpoints stay, and the best."""

    dir: Location = "runs"
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
    except (ValueError, RecursionError) as error:
        raise JobError([f"{path}: not a TOML file: {error}"]) from error


def parse_value(text: str) -> Any:
    """A flag's value as TOML would read it: numbers, booleans, arrays, tables; anything else is a string."""
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


def parse_job(
    raw: Mapping[str, Any],
    *,
    rules: Mapping[str, type[BaseModel]],
    choices: Mapping[str, Iterable[str]],
    further: Callable[[Job], Iterable[str]],
) -> Job:
    """Check the raw tables against the models, the rules' own parameters and the registries (`section.key` → names).

    Raises JobError with every problem found: those of what is wrong by itself, and those that `further` and the
    checks here see in the rest of the job.
    """
    problems: list[str] = []
    wrong: set[tuple[int | str, ...]] = set()
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        problems += _readable(error, Job)
        wrong = {item["loc"][:2] for item in error.errors()}
        job = Job.model_validate(_without(raw, wrong))
    problems += _unknown_choices(job, choices)
    problems += _contradictions(job)
    problems += _too_many_increments(job.train) if ("train", "epochs") not in wrong else []
    problems += _rule_problems(job, rules) if ("train", "strategy") not in wrong else []
    problems += further(job)
    if problems:
        raise JobError(problems)
    return job


def _without(raw: Mapping[str, Any], wrong: set[tuple[int | str, ...]]) -> dict[str, Any]:
    """The raw tables less these sections and keys."""
    return {
        section: {key: value for key, value in table.items() if (section, key) not in wrong}
        for section, table in raw.items()
        if (section,) not in wrong
    }


def _readable(error: ValidationError, model: type[BaseModel], *above: str) -> Iterator[str]:
    """A line a problem; `above` is the section of the model that was checked."""
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        key, value = ".".join([*above, *loc]), f"{item['input']!r:.80}"
        if item["type"] == "extra_forbidden":
            yield f"{key}: unknown {'key' if '.' in key else 'section'}{_suggestion(model, loc)}"
        elif item["type"] in ("model_type", "dict_type"):
            yield f"{key} = {value}: write a table of keys"
        else:
            reason = item["msg"].removeprefix("Value error, ")
            yield f"{key} = {value}: {reason[0].lower()}{reason[1:]}{_purpose(model, loc[0])}"


def _purpose(model: type[BaseModel], name: str) -> str:
    """What the model says of a key, where it says anything: why its value may not be another."""
    field = model.model_fields.get(name)
    return f"; {field.description}" if field and field.description else ""


def _suggestion(model: Any, loc: list[str]) -> str:
    """For an unknown key: the one section that has it, or else the nearest key of its own table."""
    *tables, name = loc
    homes = [f"{s}.{name}" for s, f in Job.model_fields.items() if name in getattr(f.annotation, "model_fields", ())]
    if len(homes) == 1:
        return f"; did you mean {homes[0]!r}?"
    for table in tables:
        model = model.model_fields[table].annotation
    return nearest(name, model.model_fields)


def _unknown_choices(job: Job, choices: Mapping[str, Iterable[str]]) -> Iterator[str]:
    for key, known in choices.items():
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        if value is not None and value not in (names := list(known)):
            yield f"{key} = {value!r}: no such {name}{nearest(value, names)}"


def _rule_problems(job: Job, rules: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    strategy = job.train.strategy
    if strategy == "layer":
        yield from (f"rule.{key}: strategy 'layer' has no rule; remove it" for key in job.rule)
    elif strategy in rules:
        try:
            rules[strategy].model_validate(job.rule)
        except ValidationError as error:
            yield from _readable(error, rules[strategy], "rule")


def _contradictions(job: Job) -> Iterator[str]:
    model, cluster = job.model, job.cluster
    if model.name and model.layers:
        yield "model.name and model.layers: each describes the network; keep one"
    if not model.relu and ":" not in (model.name or ""):
        yield "model.relu = false: only the models C1:C2 leave it out; remove it, or choose one such as 50:500"
    if cluster.scheduler and cluster.scheduler_file:
        yield "cluster.scheduler and cluster.scheduler_file: each names the scheduler; keep one"
    if cluster.workers.given and not any(cluster.workers.given.values()):
        yield "cluster.workers = 0: a run needs at least one; raise cpu or gpu"
    yield from _training_contradictions(job.train)


_SCHEDULE_KEYS = {"constant": (), "step": ("every", "factor"), "poly": ("power",)}


def _training_contradictions(train: Train) -> Iterator[str]:
    schedule = train.schedule
    for key in ("every", "factor", "power"):
        if key not in _SCHEDULE_KEYS[schedule.name] and _is_set(schedule, key):
            yield f"train.schedule.{key}: {schedule.name!r} has no such key; remove it or name another schedule"
    yield from _sharding_contradictions(train)
    if train.partition == "udpa" and (train.increments or 1) > 1:
        yield f"train.increments = {train.increments}: partition 'udpa' gives everything at once; remove it or use idpa"
    if train.nesterov and "nesterov" in train.model_fields_set and train.momentum == 0:
        yield "train.nesterov = true: needs a momentum above 0; set train.momentum or remove it"


def _sharding_contradictions(train: Train) -> Iterator[str]:
    if train.strategy == "layer":
        for key in ("partition", "increments", "replica_size"):
            if _is_set(train, key):
                yield f"train.{key}: strategy 'layer' is one replica that sees every sample; remove it"
    elif train.sub_batches > 1 and train.replica_size == 1:
        yield (
            f"train.sub_batches = {train.sub_batches}: only strategy 'layer' and groups cut minibatches; remove it, "
            "or set train.replica_size"
        )
    if train.first_conv != "auto" and train.strategy != "layer" and train.replica_size == 1:
        yield (
            f"train.first_conv = {train.first_conv!r}: only strategy 'layer' and groups divide convolutions; remove "
            "it, or set train.replica_size"
        )
    if train.sub_batches > train.batch_size:
        yield (
            f"train.sub_batches = {train.sub_batches}: more than the {train.batch_size} samples of a minibatch; "
            "lower it or raise train.batch_size"
        )


def _is_set(table: Options, key: str) -> bool:
    """Whether a key says something else than its default: a resolved job gives every key."""
    return bool(getattr(table, key) != type(table).model_fields[key].default)


def _too_many_increments(train: Train) -> Iterator[str]:
    most = 2 * train.epochs - 1
    if train.increments is not None and train.increments > most:
        yield (
            f"train.increments = {train.increments}: {train.epochs} epochs end before the last increment is given; "
            f"use at most {most} or more epochs"
        )
