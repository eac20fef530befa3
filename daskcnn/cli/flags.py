"""Flags that stand for keys of a job, for commands with a job and for those that only need a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from daskcnn.job.elsewhere import meant_key
from daskcnn.job.reference import default_of, names_of
from daskcnn.job.resolve import apply_settings, override, parse_job, parse_value
from daskcnn.job.tables import Cluster, description_of

FLAGS = {
    "dataset": ("data.name", "NAME"),
    "data": ("data.path", "PATH"),
    "archive": ("data.archive", "FILE"),
    "model": ("model.name", "NAME"),
    "strategy": ("train.strategy", "NAME"),
    "partition": ("train.partition", "NAME"),
    "epochs": ("train.epochs", "N"),
    "batch-size": ("train.batch_size", "N"),
    "lr": ("train.lr", "RATE"),
    "seed": ("train.seed", "N"),
    "scheduler": ("cluster.scheduler", "ADDRESS"),
    "scheduler-file": ("cluster.scheduler_file", "FILE"),
    "workers": ("cluster.workers", "cpu=N,gpu=N"),
    "only": ("cluster.only", "NAME,…"),
    "wait": ("cluster.wait", "SECONDS"),
    "name": ("run.name", "NAME"),
    "run-dir": ("run.dir", "PATH"),
    "time-limit": ("run.time_limit", "TIME"),
}
"""The flags that stand for keys of the job, and what their values look like."""
_NUMBERS = ("N", "RATE", "SECONDS", "TIME")
"""Metavars of values that are, or may be, numbers. Others are text: a run may be named 5."""


def job_flags(function: Any) -> Any:
    """Add the flags that stand for keys of the job file. Values are checked with the job, all problems at once."""
    for flag, (key, metavar) in reversed(FLAGS.items()):
        names = [*names_of(key), *(["any other that lies at --data"] if key == "data.name" else [])]
        known = f" One of: {', '.join(names)}." if names else ""
        default = f"  [{key}; default: {default_of(key)}]" if default_of(key) else f"  [{key}]"
        function = _option(flag, metavar, f"{description_of(key)}{known}{default}")(function)
    return function


def _option(flag: str, metavar: str, text: str) -> Any:
    return click.option(f"--{flag}", metavar=metavar, multiple=metavar.endswith("…"), help=text)


def meant_flags(word: str) -> list[str]:
    """Return the flag, or `--set`, for a word that other programs have for a key of the job; none for other words."""
    key = meant_key(word)
    return [f"--{flag}" for flag, (own, _) in FLAGS.items() if own == key] or ([f"--set {key}=…"] if key else [])


def cluster_options(function: Any) -> Any:
    """Add the options of every command that works on a cluster and has no job."""
    for flag in ("workers", "only", "wait", "scheduler-file", "scheduler"):
        key, metavar = FLAGS[flag]
        function = _option(flag, metavar, description_of(key))(function)
    return function


Flags = Mapping[str, str | tuple[str, ...] | None]
"""Flags as they were given; None, or nothing where one may be given again and again, for those that were not."""


def override_by_flags(raw: dict[str, Any], flags: Flags, settings: Iterable[str]) -> None:
    """Set the keys that flags stand for, then those of the settings."""
    for flag, text in flags.items():
        if isinstance(text, str):
            key, metavar = FLAGS[flag.replace("_", "-")]
            override(raw, key, parse_value(text) if metavar in _NUMBERS else text)
        elif text:
            override(raw, FLAGS[flag][0], ",".join(text))
    apply_settings(raw, settings)


def add_imports(raw: dict[str, Any], modules: Iterable[str]) -> None:
    """Add modules to those that the job file names. Raises JobError as `override` does."""
    run = raw.get("run")
    given = run.get("imports") if isinstance(run, Mapping) else None
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    override(raw, "run.imports", list(dict.fromkeys([*named, *modules])))


def cluster_of(flags: Flags) -> Cluster | None:
    """Return the table `[cluster]` that the flags of `cluster_options` give; None if none is given. Raises JobError."""
    given = {key: value if isinstance(value, str) else ",".join(value) for key, value in flags.items() if value}
    numbers = {key: parse_value(value) for key, value in given.items() if key == "wait"}
    return parse_job({"cluster": {**given, **numbers}}).cluster if given else None
