"""What a job may say: every key of every section, what is refused, and that all of it is refused at once."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from daskcnn.errors import JobError
from daskcnn.job import elsewhere
from daskcnn.job.options import Options, meaning_of
from daskcnn.job.reference import names_of, tables
from daskcnn.job.resolve import override, parse_job, parse_value, read_job_file, resolve
from daskcnn.job.tables import Cluster, Job, keys_of
from daskcnn.nn import OPTIMIZERS
from daskcnn.ps import RULES


class NoTable:
    """What no key takes."""


def parsed(raw: dict[str, Any]) -> Job:
    return parse_job(raw)


def problems(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(JobError) as caught:
        parsed(raw)
    assert str(caught.value).count("\n") == len(caught.value.problems)  # a line each, below the heading
    return list(caught.value.problems)


def at(key: str, value: Any) -> dict[str, Any]:
    """The tables of a job that says nothing but this."""
    raw: dict[str, Any] = {}
    override(raw, key, value)
    return raw


def keys(model: Any = Job, above: str = "") -> Iterator[str]:
    """Every key that a job may have, tables within sections included."""
    for name, field in keys_of(model).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{above}{name}.")
        elif above:
            yield above + name


def keys_of_section(model: Any) -> Iterator[str]:
    """The keys of a section, tables too."""
    yield from keys_of(model) if isinstance(model, type) else ()


KEYS = sorted(keys())
TEXTS = {
    *("data.name", "data.path", "data.archive", "model.name", "model.from", "train.strategy", "train.partition"),
    *("data.images", "data.labels", "data.test_images", "data.test_labels"),
    *("cluster.scheduler", "cluster.scheduler_file", "cluster.only_from", "run.dir", "run.name", "run.mlflow"),
}


def test_a_job_that_says_nothing_is_one() -> None:
    assert parsed({}) == Job()


def test_every_key_is_there() -> None:
    assert {"data.limit", "train.schedule.power", "cluster.workers.gpu", "run.keep"} < set(KEYS)
    assert len(KEYS) > 35


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_a_wrong_type_is_refused_by_its_key(key: str) -> None:
    (problem,) = problems(at(key, NoTable))
    assert problem.startswith(f"{key} = ")
    assert "NoTable" in problem


@pytest.mark.parametrize("key", sorted(set(KEYS) - TEXTS - {"cluster.only"}))
def test_a_text_is_no_number(key: str) -> None:
    (problem,) = problems(at(key, "7x"))
    assert problem.startswith(f"{key} = '7x': ")


@pytest.mark.parametrize("key", sorted(TEXTS))
def test_a_number_is_no_text(key: str) -> None:
    assert problems(at(key, 7)) == [f"{key} = 7: input should be a valid string"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("train.epochs", value) for value in (True, "5", 2.5)),
        *(("train.nesterov", value) for value in (1, "yes")),
        *(("train.lr", value) for value in (True, "0.1")),
        ("cluster.workers.cpu", "2"),
    ],
)
def test_a_value_is_not_taken_for_one_of_another_type(key: str, value: object) -> None:
    (problem,) = problems(at(key, value))
    assert problem.startswith(f"{key} = {value!r}: ")


def test_a_whole_number_will_do_where_a_fraction_may_be() -> None:
    assert parsed(at("train.lr", 1)).train.lr == 1.0


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("data.validation", 0, "greater than or equal to 1"),
        ("data.limit", 0, "greater than or equal to 1"),
        ("data.augment", "flip", "'none' or 'crop-mirror'"),
        ("data.order", "random", "'shuffled' or 'stored'"),
        ("data.path", "", "at least 1 character"),
        ("data.archive", "a\0b", "NUL character"),
        ("model.layers", [], "at least 1 item"),
        ("model.layers", [3], "write a table of keys"),
        ("model.dtype", "float16", "'float32' or 'float64'"),
        ("train.increments", 0, "greater than or equal to 1"),
        ("train.epochs", 0, "greater than or equal to 1"),
        ("train.batch_size", -1, "greater than or equal to 1"),
        ("train.batch_size", "much", 'or write "auto"'),
        ("train.largest_batch", 0, "'memory' or a whole number from 1"),
        ("train.lr", 0.0, "greater than 0"),
        ("train.lr", float("inf"), "finite"),
        ("train.lr", float("nan"), "finite"),
        ("train.momentum", 1.0, "less than 1"),
        ("train.momentum", -0.1, "greater than or equal to 0"),
        ("train.weight_decay", -1e-9, "greater than or equal to 0"),
        ("train.schedule", "falling", "'constant', 'step', 'poly', 'cosine' or 'onecycle'"),
        ("train.schedule", 3, 'a table such as {name = "step"'),
        ("train.optimizer", 3, 'a table such as {name = "adamw"'),
        ("train.optimizer.beta2", 1, "less than 1"),
        ("train.optimizer.epsilon", 0, "greater than 0"),
        ("train.optimizer.trust", 0, "greater than 0"),
        ("train.clip", 0, "greater than 0"),
        ("train.rates.conv1", 0, "greater than 0"),
        ("train.ema", 1, "less than 1"),
        ("train.lookahead.alpha", 1.5, "less than or equal to 1"),
        ("train.lookahead.last", 0, "greater than 0"),
        ("train.schedule.factor", 1.5, "less than or equal to 1"),
        ("train.schedule.every", 0, "greater than 0"),
        ("train.schedule.power", 0, "greater than 0"),
        ("train.schedule.peak", 1.5, "less than or equal to 1"),
        ("train.schedule.warmup", -1, "greater than or equal to 0"),
        ("train.loss", "hinge", "'sigmoid', 'reconstruction' or 'sigmoid-reconstruction'"),
        ("train.class_weights", "even", 'write "balanced", or numbers of 0 to 1e30'),
        ("train.class_weights", [1.0, -1.0], "as a list or as a table by class"),
        ("train.class_weights", [1.0, 1e31], "as a list or as a table by class"),
        ("train.class_weights", [1.0, float("inf")], "as a list or as a table by class"),
        ("train.class_weights", {"ship": "much"}, "as a list or as a table by class"),
        ("train.class_weights", [], "as a list or as a table by class"),
        ("train.class_weights", True, "as a list or as a table by class"),
        ("train.seed", -1, "greater than or equal to 0"),
        ("train.seed", 2**63, "less than"),
        ("train.threads", 0, "greater than or equal to 1"),
        ("train.threads", 10**9, "less than or equal to 4096"),
        ("train.replica_size", 0, "greater than or equal to 1"),
        ("train.early_stopping", 0, "greater than or equal to 1"),
        ("cluster.workers", 3, "write cpu=2"),
        ("cluster.workers", "cpu", "write cpu=2"),
        ("cluster.workers", "cpu=-1", "write cpu=2"),
        ("cluster.workers", "cpu=2,cpu=3", "a kind stands there twice"),
        ("cluster.workers.cpu", -1, "write a number such as 2"),
        ("cluster.workers.cpu", True, "write a number such as 2"),
        ("cluster.workers.cpu", "2..", 'or a range such as "2..8"'),
        ("cluster.workers", "cpu=8..2", 'the least comes first: write "2..8"'),
        ("cluster.workers.gpu", "0..0", "write 0 for no workers of this kind"),
        ("cluster.wait", -1, "greater than or equal to 0"),
        ("cluster.stall_timeout", 0, "greater than 0"),
        ("cluster.wire", "float8", "'float32', 'float16' or 'int8'"),
        ("run.dir", "", "at least 1 character"),
        ("run.name", "a/b", "match pattern"),
        ("run.name", "..", "match pattern"),
        ("run.checkpoint_every", 0, "greater than 0"),
        ("run.keep", 0, "greater than or equal to 1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_bound(key: str, value: object, bound: str) -> None:
    (problem,) = problems(at(key, value))
    assert problem.startswith(key)
    assert bound in problem


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("trian.epochs", "trian: unknown section; did you mean 'train'?"),
        ("xyz.epochs", "xyz: unknown section; known: cluster, data, model, rule, run, train"),
        ("train.epoch", "train.epoch: unknown key; did you mean 'epochs'?"),
        ("train.momentun", "train.momentun: unknown key; did you mean 'momentum'?"),
        ("train.schedule.pwer", "train.schedule.pwer: unknown key; did you mean 'power'?"),
        ("cluster.workers.tpu", "cluster.workers.tpu: unknown key; did you mean 'gpu'?"),
        ("data.epochs", "data.epochs: unknown key; did you mean 'train.epochs'?"),
        ("rule.combin", "rule.combin: unknown key; did you mean 'combine'?"),
        (
            "run.qqq",
            "run.qqq: unknown key; known: checkpoint_every, dashboard, dir, imports, keep, mlflow, name, "
            "prometheus, report_every, snapshot_every, tensorboard, time_limit",
        ),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_right_one(key: str, suggestion: str) -> None:
    assert problems(at(key, 1)) == [suggestion]


def test_a_key_outside_its_section_is_sent_there() -> None:
    assert problems({"epochs": 3}) == ["epochs: unknown section; did you mean 'train.epochs'?"]


@pytest.mark.parametrize("section", ["data", "model", "train", "rule", "cluster", "run"])
def test_a_section_is_a_table(section: str) -> None:
    assert problems({section: 5}) == [f"{section} = 5: write a table of keys"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model": {"name": "quick", "layers": [{"layer": "relu"}]}}, "model.name and model.layers"),
        ({"model": {"name": "quick", "relu": False}}, "model.relu = false"),
        (
            {"cluster": {"scheduler": "tcp://a:1", "scheduler_file": "f"}},
            "cluster.scheduler and cluster.scheduler_file",
        ),
        ({"cluster": {"workers": {"cpu": 0, "gpu": 0}}}, "cluster.workers = 0"),
        ({"cluster": {"workers": "gpu=0"}}, "cluster.workers = 0"),
        ({"train": {"strategy": "layer", "partition": "idpa"}}, "train.partition"),
        ({"train": {"strategy": "layer", "increments": 2}}, "train.increments"),
        ({"train": {"strategy": "layer", "replica_size": 2}}, "train.replica_size"),
        ({"train": {"strategy": "layer"}, "cluster": {"ps_shards": 3}}, "cluster.ps_shards = 3: strategy 'layer'"),
        ({"data": {"name": "cifar10", "images": "x", "labels": "y"}}, "data.name = 'cifar10' and data.images"),
        ({"train": {"strategy": "layer"}, "rule": {"accuracy_on": "train"}}, "rule.accuracy_on"),
        ({"train": {"partition": "udpa", "increments": 2}}, "train.increments = 2"),
        ({"train": {"epochs": 2, "increments": 4}}, "train.increments = 4"),
        ({"train": {"momentum": 0, "nesterov": True}}, "train.nesterov = true"),
        ({"train": {"optimizer": "adamw", "momentum": 0.5}}, "train.momentum: 'adamw' has no such key"),
        ({"train": {"optimizer": "lars", "nesterov": False}}, "train.nesterov: 'lars' has no such key"),
        ({"train": {"optimizer": {"beta1": 0.5}}}, "train.optimizer.beta1: 'sgd' has no such key"),
        ({"train": {"optimizer": {"name": "adamw", "trust": 0.1}}}, "train.optimizer.trust: 'adamw' has no such key"),
        ({"train": {"optimizer": "lars", "strategy": "layer"}}, "train.optimizer = 'lars': needs norms"),
        ({"train": {"optimizer": "lars", "replica_size": 2}}, "train.optimizer = 'lars': needs norms"),
        ({"train": {"clip": 1.0, "strategy": "layer"}}, "train.clip = 1: needs norms"),
        ({"train": {"clip": 1.0, "replica_size": 2}}, "train.clip = 1: needs norms"),
        *(
            ({"train": {"reproducible": True, "strategy": name}}, "train.reproducible = true: strategy")
            for name in (*(name for name, rule in RULES.items() if not rule.barrier), "layer")
        ),
        ({"train": {"reproducible": True, "replica_size": 2}}, "train.reproducible = true: a group"),
        ({"model": {"from_checkpoint": "best"}}, "model.from_checkpoint = 'best': goes with model.from"),
        *(
            ({"train": {"ema": 0.9, "strategy": "bsp"}, "rule": {"exchange": name}}, "train.ema = 0.9: the parameter")
            for name in ("asa", "asa16")
        ),
        *(
            ({"train": {"lookahead": {}, "strategy": name}}, "train.lookahead: ")
            for name in ("easgd", "downpour", "local-sgd")
        ),
        (
            {"train": {"lookahead": {}, "strategy": "bsp"}, "rule": {"combine": "sum"}},
            "train.lookahead: strategy 'bsp'",
        ),
        ({"train": {"lookahead": {}, "replica_size": 2}}, "train.lookahead: groups"),
        ({"train": {"schedule": {"every": 3}}}, "train.schedule.every"),
        ({"train": {"schedule": {"name": "step", "power": 2}}}, "train.schedule.power"),
        ({"train": {"schedule": {"name": "cosine", "peak": 0.2}}}, "train.schedule.peak"),
        ({"train": {"epochs": 5, "schedule": {"warmup": 5}}}, "train.schedule.warmup = 5"),
    ],
)
def test_keys_that_contradict_each_other_are_named(raw: dict[str, Any], words: str) -> None:
    (problem,) = problems(raw)
    assert problem.startswith(words)
    assert any(remedy in problem for remedy in ("remove it", "keep one", "raise", "use"))


@pytest.mark.parametrize(
    "raw",
    [
        {"model": {"name": "6:9", "relu": False}},
        {"cluster": {"workers": {"cpu": 0, "gpu": 1}}},
        {"train": {"epochs": 2, "increments": 3}},
        {"train": {"partition": "udpa", "increments": 1}},
        {"train": {"momentum": 0}},
        {"train": {"optimizer": {"name": "adamw", "beta1": 0.5, "epsilon": 1e-6}, "weight_decay": 0.1}},
        {"train": {"optimizer": {"name": "lars", "trust": 0.01}, "momentum": 0, "clip": 1.0}},
        {"train": {"optimizer": "adamw", "strategy": "layer", "ema": 0.99, "lookahead": {"steps": 3}}},
        *({"train": {"strategy": name, "ema": 0.99, "clip": 1.0}} for name in RULES),
        {"train": {"strategy": "sgwu", "ema": 0.99, "replica_size": 2}},
        {"train": {"optimizer": "adamw", "replica_size": 2, "decay_all": False, "rates": {"conv*": 0.1}}},
        {"train": {"lookahead": {"alpha": 0.8, "last": 0.2}}},
        {"train": {"lookahead": {}, "strategy": "local-sgd"}, "rule": {"outer_momentum": 0.0}},
        {"train": {"schedule": {"name": "step", "every": 3, "factor": 0.5}}},
        {"train": {"schedule": {"name": "onecycle", "peak": 0.2, "final": 0.1, "warmup": 1.5}}},
    ],
)
def test_what_only_looks_contradictory_is_allowed(raw: dict[str, Any]) -> None:
    parsed(raw)


def test_all_problems_come_at_once() -> None:
    raw = {
        "trian": {},
        "data": {"validation": 0, "limt": 5},
        "model": {"name": "quick", "layers": [{}], "dtype": "half"},
        "train": {"epochs": "ten", "strategy": "sgwuu", "partition": "iddpa", "momentum": 0, "nesterov": True},
        "cluster": {"workers": {"cpu": 0}},
        "run": 5,
    }
    found = problems(raw)
    expected: tuple[str, ...] = (
        "trian",
        "data.validation",
        "data.limt",
        "model.dtype",
        "model.name and",
        "train.epochs",
        "run = 5",
        "model.layers[0]",
    )
    expected += ("train.strategy", "train.partition", "train.nesterov", "cluster.workers = 0")
    assert sorted(p for p in found for start in expected if p.startswith(start)) == sorted(found)
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("train.learning_rate", "train.learning_rate: unknown key; did you mean 'lr'?"),
        ("train.max_epochs", "train.max_epochs: unknown key; did you mean 'epochs'?"),
        ("model.learning_rate", "model.learning_rate: unknown key; did you mean 'train.lr'?"),
        ("train.num_workers", "train.num_workers: unknown key; did you mean 'cluster.workers'?"),
    ],
)
def test_words_of_other_programs_are_answered_with_the_key(key: str, suggestion: str) -> None:
    assert problems(at(key, 1)) == [suggestion]


@pytest.mark.parametrize(
    ("name", "here"), [("ddp", "bsp"), ("DDP", "bsp"), ("allreduce", "bsp"), ("fedavg", "local-sgd")]
)
def test_words_of_other_programs_are_answered_with_the_strategy(name: str, here: str) -> None:
    found = problems({"train": {"strategy": name}})
    assert found == [f"train.strategy = {name!r}: no such strategy; did you mean {here!r}?"]


def test_words_of_other_programs_stand_for_what_there_is_and_are_no_names_here() -> None:
    known = {f"{name}.{key}" for name, field in Job.model_fields.items() for key in keys_of_section(field.annotation)}
    assert set(elsewhere.KEYS.values()) <= known
    assert not elsewhere.KEYS.keys() & {key.partition(".")[2] for key in known}
    strategies = names_of("train.strategy")
    assert set(elsewhere.STRATEGIES.values()) <= set(strategies)
    assert not elsewhere.STRATEGIES.keys() & set(strategies)


def test_a_wrong_key_starts_no_second_problem_about_what_follows_from_it() -> None:
    assert len(problems({"train": {"epochs": "ten", "increments": 40}})) == 1
    assert len(problems({"train": {"strategy": 5}, "rule": {"attenuation": "paper"}})) == 1
    assert len(problems({"train": {"strategy": "agwuu"}, "rule": {"attenuation": "paper"}})) == 1


def test_a_rule_is_checked_by_its_strategy() -> None:
    assert parsed({"train": {"strategy": "agwu"}, "rule": {"attenuation": "staleness"}}).rule
    (problem,) = problems({"train": {"strategy": "agwu"}, "rule": {"attenuation": "age"}})
    assert problem == "rule.attenuation = 'age': input should be 'paper', 'paper-uncapped' or 'staleness'"
    (problem,) = problems({"train": {"strategy": "sgwu"}, "rule": {"attenuation": "paper"}})
    assert problem.startswith("rule.attenuation: unknown key")


@pytest.mark.parametrize(
    ("strategy", "key", "values", "words"),
    [
        ("easgd", "alpha", [0, -0.5, 1.01, float("nan")], "0 replica and center never meet, beyond 1 they overshoot"),
        ("easgd", "tau", [0, -3, 1.5], "it counts the steps from one exchange to the next"),
        ("admm", "rho", [-1e-9, float("inf")], "below 0 it would drive the replicas apart"),
        ("admm", "every", [-1], "0 is the round's end"),
        ("bsp", "every", [-1, 0.5], "0 is the round's end"),
        ("downpour", "n_push", [0], "it counts the steps from one push to the next"),
        ("downpour", "n_fetch", [0, -1], "it counts the steps from one pull to the next"),
        ("downpour", "server_lr", [0, float("inf")], "at 0 the center would stay where it is"),
        ("dc-asgd", "every", [-1], "it counts the steps between two pushes; 0 is the round's end"),
        ("dc-asgd", "compensation", [-0.1, float("inf")], "0 makes up for nothing, less would add to it"),
        ("dc-asgd", "memory", [-0.1, 1], "it is a part below 1"),
        ("parallel-sgd", "rounds", [0], "the run ends with one"),
        ("local-sgd", "every", [0, -1, 1.5, True, "often"], "auto goes by the time that a meeting takes"),
        ("local-sgd", "outer_lr", [0, float("nan")], "at 0 the center would stay where it is"),
        ("local-sgd", "outer_momentum", [-0.1, 1.0], "0 for none"),
        ("agwu", "accuracy_floor", [-0.1, 1.1], "it stands for an accuracy"),
        *(
            (rule, "max_staleness", [-1], "leave it out for no bound")
            for rule in ("agwu", "easgd", "downpour", "dc-asgd")
        ),
    ],
)
def test_a_rule_s_parameter_out_of_range_is_refused_with_bound_and_reason(
    strategy: str, key: str, values: list[Any], words: str
) -> None:
    for value in values:
        (problem,) = problems({"train": {"strategy": strategy}, "rule": {key: value}})
        assert problem.startswith(f"rule.{key} = {value!r}: input should be ")
        assert problem.endswith(words)


def test_auto_chooses_for_itself() -> None:
    for train in ({"strategy": "auto"}, {}):  # it is the default
        (problem,) = problems({"train": train, "rule": {"every": 4}})
        assert problem.startswith('rule.every: strategy "auto" chooses for itself; remove it, or name the strategy')
    assert parsed({"train": {"replica_size": 2}, "cluster": {"workers": {"cpu": 4}}}).rule is not None
    resolved = parsed({"train": {"strategy": "auto"}}).model_dump(mode="json")
    assert parsed(resolved).rule == RULES["auto"]()  # a run that goes on


@pytest.mark.parametrize("strategy", RULES)
def test_every_number_of_a_rule_says_why_it_has_a_bound(strategy: str) -> None:
    for name, field in RULES[strategy].model_fields.items():
        if field.metadata:  # a bound
            assert field.json_schema_extra, name


@pytest.mark.parametrize("strategy", RULES)
def test_every_rule_s_parameters_are_its_own(strategy: str) -> None:
    """A job file that names another rule's is refused, the whole table with it."""
    parsed({"train": {"strategy": strategy}, "rule": {k: f.default for k, f in RULES[strategy].model_fields.items()}})
    for key in {key for rule in RULES.values() for key in rule.model_fields} - RULES[strategy].model_fields.keys():
        (problem,) = problems({"train": {"strategy": strategy}, "rule": {key: 1}})
        assert problem.startswith(f"rule.{key}: unknown key")


def test_registries_are_asked_about_what_is_right_of_the_job() -> None:
    found = problems({"data": {"archive": "a", "limit": 0}, "model": {"name": "quikc"}, "train": {"epochs": 0}})
    assert [problem.split(" = ")[0].split(":")[0] for problem in found] == [
        *("data.limit", "train.epochs", "data.archive", "model.name")
    ]


def test_a_rule_is_checked_beside_what_is_wrong_elsewhere() -> None:
    found = problems({"train": {"strategy": "easgd", "epochs": 0}, "rule": {"tau": 0, "alpah": 0.5}})
    assert [problem[:10] for problem in found] == ["train.epoc", "rule.tau =", "rule.alpah"]
    assert found[2].endswith("did you mean 'alpha'?")


@pytest.mark.parametrize("strategy", RULES)
def test_the_rule_of_a_job_is_the_rule(strategy: str) -> None:
    job = parsed({"train": {"strategy": strategy}})
    assert job.rule == RULES[strategy]()
    assert job.model_dump(mode="json")["rule"] == {}
    assert pickle.loads(pickle.dumps(job)) == job  # noqa: S301 - our own


def test_a_job_keeps_the_parameters_that_were_given_and_no_others() -> None:
    job = parsed({"train": {"strategy": "easgd"}, "rule": {"tau": 1}})
    assert job.model_dump(mode="json")["rule"] == {"tau": 1}
    assert parsed(job.model_dump(mode="json")).model_dump() == job.model_dump()
    assert parsed({"train": {"strategy": "layer"}}).rule is None
    assert parsed({"train": {"strategy": "layer"}}).model_dump()["rule"] == {}


def test_long_values_are_cut() -> None:
    (problem,) = problems({"model": {"name": ["x" * 5000]}})
    assert len(problem) < 200


def test_an_unknown_optimizer_is_refused_with_the_nearest_name() -> None:
    (problem,) = problems({"train": {"optimizer": "adamm"}})
    assert problem == "train.optimizer.name = 'adamm': no such optimizer; did you mean 'adamw'?"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resolved_job_resolves_to_itself_with_every_optimizer(name: str) -> None:
    """A run's own job, with every key, is read again where it is resumed."""
    for more in ({}, {"momentum": 0} if name != "adamw" else {"weight_decay": 0}):
        job = resolve({"train": {"optimizer": name, **more}})
        assert resolve(job.model_dump(mode="json")) == job
        assert job.train.optimizer.name == name


def test_forms_of_schedule_and_workers() -> None:
    assert parsed(at("train.schedule", "step")).train.schedule.name == "step"
    assert parsed(at("train.schedule", "linear")).train.schedule.power == 1
    assert parsed(at("cluster.workers", " cpu=2, gpu = 1")).cluster.workers.given == {"cpu": 2, "gpu": 1}
    assert parsed(at("cluster.workers", {"gpu": 3})).cluster.workers.given == {"gpu": 3}
    assert parsed({}).cluster.workers.given == {}


def test_paths_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    job = parsed({"data": {"path": "~/a.zarr"}, "run": {"dir": "~/runs"}})
    assert (job.data.path, job.run.dir) == ("/home/ada/a.zarr", "/home/ada/runs")


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Job().train.epochs = 3  # type: ignore[misc]


def test_a_job_survives_json() -> None:
    job = parsed({"model": {"layers": [{"layer": "dense", "units": 10}]}, "cluster": {"workers": "cpu=2"}})
    assert parsed(job.model_dump(mode="json")) == job


def test_a_job_error_may_travel() -> None:
    error = copy.copy(JobError(["a", "b"]))  # as pickle does it
    assert error.problems == ("a", "b")
    assert str(error) == "the job has 2 problems:\n  a\n  b"


# --- files and flags ---


def test_a_job_file_is_toml(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[train]\nlr = 0.1\n[cluster]\nworkers = {cpu = 2}\n[run]\nname = "é"\n', encoding="utf-8")
    assert read_job_file(file) == {"train": {"lr": 0.1}, "cluster": {"workers": {"cpu": 2}}, "run": {"name": "é"}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[train\n", "not a TOML file"),
        (b"[train]\nlr = 1\nlr = 2\n", "not a TOML file"),
        (b"\xff\xfe", "not a TOML file"),
        (b"a = " + b"[" * 20_000, "not a TOML file"),
        (b"a = 1" + b"0" * 9_000, "not a TOML file"),
        (None, "No such file"),
    ],
    ids=["syntax", "twice", "binary", "nested", "huge number", "missing"],
)
def test_a_file_that_is_no_job_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "job.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(JobError, match=reason) as caught:
        read_job_file(file)
    assert str(file) in str(caught.value)


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="directory"):
        read_job_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("5", 5), ("0.1", 0.1), ("true", True), ('"5"', "5"), ("[1, 2]", [1, 2]), ("{cpu = 2}", {"cpu": 2})),
        *(
            ("quick", "quick"),
            ("50:500", "50:500"),
            ("tcp://a:1", "tcp://a:1"),
            ("", ""),
            ("cpu=2,gpu=1", "cpu=2,gpu=1"),
        ),
        *(("2026-11-20", "2026-11-20"), ("12:30:00", "12:30:00"), ("[" * 20_000, "[" * 20_000)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_values_of_flags_are_read_as_toml(text: str, value: object) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("given", ["cpu=2..8,gpu=1", "cpu = 2 .. 8 , gpu = 1", {"cpu": "2..8", "gpu": 1}])
def test_workers_may_be_a_range(given: Any) -> None:
    workers = parse_job({"cluster": {"workers": given}}).cluster.workers
    assert (workers.given, workers.most, workers.ranged) == ({"cpu": 2, "gpu": 1}, {"cpu": 8, "gpu": 1}, True)
    assert workers.text == "cpu=2..8,gpu=1"
    assert parse_job({"cluster": {"workers": workers.model_dump(mode="json")}}).cluster.workers == workers


def test_a_table_is_made_without_its_source_and_its_keys_have_the_docstrings_below_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads of a worker that parsed at once made CPython 3.11 fail, and the worker with it."""
    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", None)

        class Own(Options):
            number: int = 1

    assert meaning_of(Own, "number") == ""
    assert meaning_of(Cluster, "settle").startswith("Seconds without a new worker after which a job that takes all ")
    assert all(entry.meaning for table in tables() for entry in table.keys)


def test_more_workers_than_are_named_are_refused_and_a_pattern_names_any_number() -> None:
    with pytest.raises(JobError, match=r"cluster\.workers = cpu=3: cluster\.only names 2; name more, give a pattern"):
        parse_job({"cluster": {"workers": "cpu=3", "only": "desk-1,desk-9"}})
    for workers, only in (("cpu=2", "desk-1,desk-9"), ("cpu=2..8", "desk-1,desk-9"), ("cpu=3", "desk-1,lab-*")):
        parse_job({"cluster": {"workers": workers, "only": only}})


def test_a_range_begins_with_a_worker_and_is_not_reproducible() -> None:
    with pytest.raises(JobError, match=r"cluster\.workers = cpu=0\.\.4: a run needs at least one"):
        parse_job({"cluster": {"workers": "cpu=0..4"}})
    with pytest.raises(JobError, match=r"cpu=1\.\.4: train\.reproducible promises the same numbers"):
        parse_job({"cluster": {"workers": "cpu=1..4"}, "train": {"reproducible": True, "strategy": "bsp"}})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "cluster.workers is no range of one kind"),
        ({"cluster": {"workers": "cpu=4"}}, "cluster.workers = cpu=4 is no range"),
        ({"cluster": {"workers": "cpu=1..4,gpu=1"}}, "is no range of one kind"),
        ({"train": {"strategy": "layer"}, "cluster": {"workers": "cpu=1..4"}}, "with strategy 'layer'"),
        ({"train": {"replica_size": 2}, "cluster": {"workers": "cpu=2..4"}}, "train.replica_size = 2"),
    ],
)
def test_a_job_that_asks_for_workers_has_a_range_and_replicas_of_one(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as told:
        parse_job({**tables, "cluster": {**tables.get("cluster", {}), "adapt": True}})
    assert words in str(told.value)
    assert parse_job({"cluster": {"workers": "gpu=1..4", "adapt": True}}).cluster.adapt


def test_override_makes_tables_on_its_way() -> None:
    raw: dict[str, Any] = {"train": {"lr": 1}}
    override(raw, "train.schedule.power", 2)
    override(raw, "train.lr", 3)
    assert raw == {"train": {"lr": 3, "schedule": {"power": 2}}}


@pytest.mark.parametrize("key", ["epochs", "", ".", "train.", ".epochs", "train..epochs"])
def test_override_needs_a_section_and_a_key(key: str) -> None:
    with pytest.raises(JobError, match=r"write section.key=value"):
        override({}, key, 1)


def test_override_never_drops_what_it_is_given() -> None:
    raw: dict[str, Any] = {"train": {"schedule": "step"}, "data": 5}
    with pytest.raises(JobError, match=r"train\.schedule is 'step'"):
        override(raw, "train.schedule.every", 3)
    with pytest.raises(JobError, match="data is 5"):
        override(raw, "data.path", "x")


@pytest.mark.parametrize("model", [*Job.model_fields.values(), *RULES.values()], ids=str)
def test_every_key_says_what_it_means_in_a_sentence(model: Any) -> None:
    tables = [model if isinstance(model, type) else model.annotation]
    for table in tables:
        for name, field in getattr(table, "model_fields", {}).items():
            meaning = meaning_of(table, name)
            assert meaning, name
            assert meaning[0].isupper() or meaning[0] == "`", name
            assert meaning.endswith("."), name
            inner = field.annotation
            tables += [inner] if isinstance(inner, type) and issubclass(inner, BaseModel) else []


def test_options_are_strict_everywhere() -> None:
    models: list[type[BaseModel]] = [Job, *Options.__subclasses__()]
    for model in models:
        assert model.model_config["extra"] == "forbid"
        assert model.model_config["frozen"]
        assert model.model_config["strict"]


def test_the_keys_of_a_table_are_told_once() -> None:
    with pytest.raises(JobError) as refused:
        resolve({"train": {"qqq": 1, "zzz": 2, "epoch": 3}, "run": {"xxx": 4}})
    told = {problem.partition(":")[0]: problem for problem in refused.value.problems}
    assert ["; known: " in told[key] for key in ("train.qqq", "train.zzz", "run.xxx")] == [True, False, True]
    assert told["train.epoch"].endswith("did you mean 'epochs'?")


# --- steps that grow ---


def test_an_automatic_batch_begins_with_the_usual_one_and_grows_as_memory_allows() -> None:
    train = parsed(at("train.batch_size", "auto")).train
    assert (train.batch_size, train.largest_batch) == (64, "memory")
    assert "batch_size" not in train.model_fields_set
    job = parsed({"train": {"batch_size": "auto", "largest_batch": 512}})
    assert job.train.largest_batch == 512
    assert parsed(job.model_dump(mode="json")).train == job.train
    assert parsed(at("train.batch_size", 32)).train.largest_batch is None


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ({"strategy": "layer"}, "strategy 'layer' cut each step by their shards"),
        ({"replica_size": 2}, "groups cut each step by their shards"),
        ({"strategy": "agwu"}, "replicas make steps of their own here"),
        ({"strategy": "local-sgd"}, "replicas make steps of their own here"),
        ({"reproducible": True}, "measured seconds"),
    ],
)
def test_steps_do_not_grow_where_their_noise_or_time_is_not_measured(train: dict[str, Any], reason: str) -> None:
    (problem,) = problems({"train": {"batch_size": "auto", **train}})
    assert problem.startswith('train.batch_size = "auto": ')
    assert reason in problem


def test_the_largest_step_is_not_below_the_first() -> None:
    (problem,) = problems({"train": {"batch_size": 64, "largest_batch": 32}})
    assert problem == "train.largest_batch = 32: less than train.batch_size = 64; raise it or remove it"
