"""From tables to a job that says everything, and what is wrong with its data and its network."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import daskcnn
from daskcnn.errors import DataError, JobError, UserError
from daskcnn.job.dataset import on_data
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.launch.dry_run import readable_plan
from daskcnn.launch.prepared_job import prepare_job
from daskcnn.launch.recorder import start_event
from daskcnn.ps import RULES
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.show.lines import describe
from tests.tiny_runs import LAYERS, tiny_data, tiny_job, tiny_run


def prepared(raw: dict[str, Any]) -> Any:
    return prepare_job(resolve(raw), progress=lambda *_: None, warn=lambda _: None)


def refusal(raw: dict[str, Any], kind: type[UserError] = JobError) -> str:
    with pytest.raises(kind) as caught:
        prepared(raw)
    return str(caught.value)


# --- defaults ---


def test_the_built_in_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    job = resolve({})
    assert (job.data.name, job.data.path, job.data.augment) == (
        "synthetic",
        str(tmp_path / "data/synthetic.zarr"),
        "none",
    )
    assert (job.train.strategy, job.train.partition, job.train.increments) == ("auto", "idpa", 4)
    job = on_data(job, "synthetic", (32, 32, 3), 10, 8000)
    assert (job.model.name, job.data.validation, job.train.optimizer.name, job.train.lr) == ("quick", 800, "sgd", 0.02)


@pytest.mark.parametrize(("name", "augment"), [("cifar10", "crop-mirror"), ("mnist", "none"), ("synthetic", "none")])
def test_augmentation_suits_the_data_set(name: str, augment: str) -> None:
    assert resolve({"data": {"name": name}}).data.augment == augment
    assert resolve({"data": {"name": name, "augment": "none"}}).data.augment == "none"


@pytest.mark.parametrize(
    ("train", "partition", "increments"),
    [
        ({}, "idpa", 4),
        ({"epochs": 1}, "idpa", 1),
        ({"epochs": 2}, "idpa", 3),
        ({"partition": "idpa-paper"}, "idpa-paper", 4),
        ({"partition": "udpa"}, "udpa", 1),
        ({"increments": 2}, "idpa", 2),
        ({"strategy": "agwu"}, "idpa", 4),
        ({"strategy": "parallel-sgd"}, "idpa", 1),  # increments would be rounds of their own
        ({"strategy": "parallel-sgd", "partition": "udpa"}, "udpa", 1),
        ({"strategy": "layer"}, None, None),
    ],
)
def test_partition_and_increments(train: dict[str, Any], partition: str | None, increments: int | None) -> None:
    found = resolve({"train": train}).train
    assert (found.partition, found.increments) == (partition, increments)


def test_layers_need_no_name() -> None:
    assert resolve({"model": {"layers": LAYERS}}).model.name is None


def test_without_momentum_there_is_no_nesterov() -> None:
    assert not resolve({"train": {"momentum": 0}}).train.nesterov
    assert resolve({}).train.nesterov


def test_paths_are_absolute_and_urls_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    job = resolve({"data": {"name": "mnist", "path": "a.zarr", "archive": "idx"}})
    assert (job.data.path, job.data.archive) == (str(tmp_path / "a.zarr"), str(tmp_path / "idx"))
    assert resolve({"data": {"path": "s3://bucket/a.zarr"}}).data.path == "s3://bucket/a.zarr"


@pytest.mark.parametrize(
    "train",
    [{}, {"partition": "udpa"}, {"momentum": 0}, {"epochs": 1}, *({"strategy": each} for each in [*RULES, "layer"])],
)
def test_a_resolved_job_is_a_job_and_stays_as_it_is(train: dict[str, Any]) -> None:
    """What a run keeps in job.json must be good for a resume."""
    job = resolve({"train": train})
    assert resolve(job.model_dump(mode="json")) == job


# --- what is wrong before data are looked at ---


def test_problems_of_registries_come_with_the_others() -> None:
    raw = {
        "data": {"name": "mnst", "archive": "a", "validation": 0},
        "model": {"layers": [{"layer": "conv", "kernels": 4, "siz": 3}]},
        "train": {"partition": "idpb"},
    }
    with pytest.raises(JobError) as caught:
        resolve(raw)
    validation, name, partition, layer = sorted(caught.value.problems, key=str.__len__)[-4:]
    text = str(caught.value)
    assert len(caught.value.problems) == 4, (validation, name, partition, layer)
    assert "not of data.name = 'mnst'; did you mean 'mnist'?" in text
    assert "train.partition = 'idpb': no such partition; did you mean 'idpa'?" in text
    assert "model.layers[0]: siz: conv has no such option; did you mean 'size'?" in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "quikc"}, 'model.name: model "quikc"'),
        ({"name": "0:5"}, 'model.name: model "0:5"'),
        ({"layers": [{"layer": "cnov"}]}, 'model.layers[0]: layer = "cnov"'),
        ({"layers": [{"layer": "relu"}, {}]}, "model.layers[1]: "),
        ({"layers": [{"layer": "conv", "size": 3}]}, "conv needs kernels"),
        ({"layers": [{"layer": "conv", "kernels": "4", "size": 3}]}, "kernels = '4'"),
        ({"layers": [{"layer": "dropout", "rate": 1.5}]}, "rate"),
    ],
)
def test_a_network_that_is_none_is_named_before_data_are_looked_at(model: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        resolve({"model": model})
    (problem,) = caught.value.problems
    assert words in problem


@pytest.mark.parametrize("key", [None, 1.5, ("a", "b"), b"lr", "l\udcffr"])
def test_a_key_that_is_no_text_is_refused(key: Any) -> None:
    jobs: list[dict[Any, Any]] = [{key: {}}, {"train": {key: 3}}, {"model": {"layers": [{key: 3}]}}]
    for job in jobs:
        with pytest.raises(JobError, match=r"^the job has a problem:\n  the key .* is no text in UTF-8"):
            daskcnn.dry_run(job)


def test_a_built_in_data_set_takes_no_archive() -> None:
    with pytest.raises(JobError, match=r"data.archive = 'x': synthetic is built in; remove it"):
        resolve({"data": {"archive": "x"}})


# --- what a rule asks of the rest of the job ---


@pytest.mark.parametrize("strategy", RULES)
@pytest.mark.parametrize("workers", ["cpu=1", "cpu=0,gpu=1", "cpu=2", "cpu=1,gpu=1"])
def test_a_rule_that_joins_replicas_is_refused_one_worker(strategy: str, workers: str) -> None:
    raw = {"train": {"strategy": strategy}, "cluster": {"workers": workers}}
    if sum(resolve({"cluster": {"workers": workers}}).cluster.workers.given.values()) >= RULES[strategy].fewest:
        resolve(raw)
        return
    with pytest.raises(JobError) as caught:
        resolve(raw)
    assert caught.value.problems == (
        f"cluster.workers = 1: strategy {strategy!r} joins replicas, so it needs at least 2; "
        "raise cpu or gpu, or use another strategy such as sgwu",
    )


def test_two_rules_need_two_workers() -> None:
    assert {name for name, rule in RULES.items() if rule.fewest > 1} == {"admm", "parallel-sgd"}
    resolve({"train": {"strategy": "admm"}})  # as many as there are: seen when they are there


def test_no_workers_at_all_is_one_problem() -> None:
    with pytest.raises(JobError) as caught:
        resolve({"train": {"strategy": "admm"}, "cluster": {"workers": "cpu=0"}})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("train", "rounds", "words"),
    [
        ({"epochs": 10}, 11, "rule.rounds = 11: a round is at least one pass, and the run has 10; lower it, or raise"),
        ({"increments": 2}, 1, "train.increments = 2: the rounds of 'parallel-sgd' end before the last one is given"),
        ({"increments": 4}, 2, "use at most 3, or more rounds"),
        ({"increments": 20}, 1, "train.increments = 20: 10 epochs end before the last increment is given"),
    ],
)
def test_rounds_epochs_and_increments_of_parallel_sgd_fit_together(
    train: dict[str, Any], rounds: int, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        resolve({"train": {"strategy": "parallel-sgd", **train}, "rule": {"rounds": rounds}})
    (problem,) = caught.value.problems
    assert words in problem


@pytest.mark.parametrize(("epochs", "increments", "rounds"), [(10, 1, 1), (10, 3, 2), (10, 19, 10), (1, 1, 1)])
def test_increments_that_are_all_given_are_allowed(epochs: int, increments: int, rounds: int) -> None:
    raw = {"strategy": "parallel-sgd", "epochs": epochs, "increments": increments}
    assert resolve({"train": raw, "rule": {"rounds": rounds}}).train.increments == increments


def test_a_wrong_parameter_starts_no_second_problem_about_what_follows_from_it() -> None:
    with pytest.raises(JobError) as caught:
        resolve({"train": {"strategy": "parallel-sgd", "increments": 3}, "rule": {"rounds": 0}})
    assert [problem[:15] for problem in caught.value.problems] == ["rule.rounds = 0"]


# --- what is wrong with data and network together ---

LAYER = {"strategy": "layer"}
BATCH_NORM = [
    {"layer": "conv", "kernels": 4, "size": 3},
    {"layer": "batchnorm"},
    {"layer": "conv", "kernels": 4, "size": 3},
    *LAYERS[-1:],
]


def test_a_job_that_fits_is_prepared(path: str) -> None:
    ready = prepared(tiny_job(path))
    assert ready.samples == 100
    assert ready.layout.size > ready.layout.parameter_size > 0


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"data": {"validation": 120}},
            "data.validation = 120: leaves nothing of 120 training samples; lower it, such as --set data.validation=12",
        ),
        ({"data": {"limit": 20}}, "data.validation = 20: leaves nothing of 20 training samples"),
        ({"train": {"epochs": 99, "increments": 101}}, "train.increments = 101: more than 100 training samples"),
        ({"model": {"layers": LAYERS[:-1]}}, "end it with a dense layer of 10 units"),
        ({"model": {"layers": [{"layer": "dense", "units": 9}]}}, "end it with a dense layer of 10 units"),
        ({"model": {"layers": [{"layer": "conv", "kernels": 2, "size": 9}, *LAYERS[-1:]]}}, "9"),
        ({"model": {"layers": [{"layer": "maxpool", "size": 16}, *LAYERS[-1:]]}}, "16"),
        (
            {"train": {"batch_size": 1}, "model": {"layers": [*LAYERS, {"layer": "batchnorm"}]}},
            "train.batch_size = 1: batchnorm2 normalises each channel over a minibatch, which has one number of it",
        ),
        (
            {"train": LAYER | {"sub_batches": 2}, "model": {"layers": BATCH_NORM}},
            "train.sub_batches = 2: batchnorm1 takes the mean of a whole minibatch; use 1",
        ),
        (
            {"train": LAYER | {"sub_batches": 2}, "data": {"augment": [{"step": "mixup"}]}},
            "train.sub_batches = 2: mixup takes the next image of a whole minibatch; use 1",
        ),
        (
            {"train": LAYER | {"first_conv": "samples"}, "model": {"layers": BATCH_NORM}},
            "train.first_conv = 'samples': batchnorm1 takes the mean of a whole minibatch; use 'kernels'",
        ),
        (
            {"train": LAYER | {"first_conv": "samples"}},
            "train.first_conv = 'samples': only where a convolution comes first, and another behind",
        ),
    ],
)
def test_a_job_that_does_not_fit_its_data_is_refused(path: str, sections: dict[str, Any], words: str) -> None:
    assert words in refusal(tiny_job(path, **sections))


def test_all_that_does_not_fit_comes_at_once(path: str) -> None:
    job = tiny_job(path, data={"validation": 500}, model={"layers": [{"layer": "dense", "units": 9}]})
    assert "2 problems" in refusal(job)


def test_a_network_too_large_for_this_machine_is_a_problem_of_the_job(path: str) -> None:
    layers = [{"layer": "dense", "units": 1000}, {"layer": "dense", "units": 2**31}, *LAYERS[-1:]]
    assert "more than this machine has; choose a smaller network" in refusal(tiny_job(path, model={"layers": layers}))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "cifar10"}, "holds synthetic, the job wants cifar10; set data.name or data.path"),
        ({"order": "stored"}, "is stored in order 'shuffled', the job wants 'stored'; set data.order"),
        ({"limit": 1}, "limit=1 leaves training samples of one class only; raise data.limit"),
    ],
)
def test_other_data_than_the_job_wants_are_named(path: str, data: dict[str, Any], words: str) -> None:
    assert words in refusal(tiny_job(path, data=data), DataError)


def test_an_empty_folder_is_no_data_set(tmp_path: Path) -> None:
    assert "no data set here; check the path, or make a data set with" in refusal(tiny_job(str(tmp_path)), DataError)


def test_a_data_set_that_is_not_there_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(name: str, *, out: str, order: str, **_: Any) -> str:
        assert order == "shuffled"
        return tiny_data(Path(out).parent, name=name)

    monkeypatch.setattr(import_module("daskcnn.datasets.job_dataset"), "prepare", prepare)
    assert prepared(tiny_job(str(tmp_path / "synthetic.zarr"), data={"name": "synthetic"})).samples == 100


# --- names of data sets ---


def test_a_path_alone_takes_the_name_of_the_store_that_is_there(tmp_path: Path) -> None:
    """And the augmentation that suits it."""
    found = prepared(tiny_job(tiny_data(tmp_path, name="cifar10"))).job.data
    assert (found.name, found.augment) == ("cifar10", "crop-mirror")
    assert resolve({"data": {"path": "x"}}).data.name is None


@pytest.mark.parametrize("named", [{}, {"name": "ships at sea"}])
def test_a_data_set_has_any_name(tmp_path: Path, named: dict[str, Any]) -> None:
    job = tiny_job(tiny_data(tmp_path, name="ships at sea"), data=named)
    found = prepared(job).job
    assert (found.data.name, found.data.augment) == ("ships at sea", "none")
    assert resolve(found.model_dump(mode="json")) == found
    other = tiny_job(str(tmp_path / "ships at sea.zarr"), data={"name": "ships"})
    assert "holds ships at sea, the job wants ships; set data.name or data.path" in refusal(other, DataError)


def test_a_name_alone_means_the_store_under_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    tiny_data(tmp_path / "data", name="ships")
    job = tiny_job("") | {"data": {"name": "ships", "validation": 20}}
    assert prepared(job).dataset.path == str(tmp_path / "data" / "ships.zarr")
    assert resolve(job).data.augment == "none"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"name": "ships"},
            "make it there: `daskcnn data prepare folder IMAGES --size 32x32 --out {}/data/ships.zarr`; known: ci",
        ),
        ({"name": "synthetc"}, "{}/data/synthetc.zarr: no data set here"),
        ({"name": "synthetc"}, "did you mean 'synthetic'?"),
        (
            {"name": "ships", "path": "here.zarr"},
            "`daskcnn data prepare folder IMAGES --size 32x32 --out {}/here.zarr`",
        ),
        ({"path": "here.zarr"}, "{}/here.zarr: no data set here; correct data.path (--data), or make it there: `"),
        ({"name": "cifar10", "path": "here.zarr"}, "make it there with `daskcnn data prepare cifar10 --out {}/here"),
    ],
)
def test_a_data_set_that_is_not_there_is_refused_with_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words.format(tmp_path) in refusal({"data": data}, DataError)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"archive": "a", "path": "x"}, "no data set is named; set data.name to the one it is of: cifar10, cifar100"),
        (
            {"archive": "a", "name": "ships", "path": "x"},
            "archives are of cifar10, cifar100, fashion-mnist, mnist, not",
        ),
    ],
)
def test_an_archive_is_of_a_data_set_that_can_be_imported(data: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        resolve({"data": data})


# --- the job of an earlier run ---


def test_a_kept_job_is_the_job(tmp_path: Path, path: str) -> None:
    raw = tiny_job(path, train={"strategy": "layer"})
    assert kept_job(RunDirectory.open(tiny_run(tmp_path, raw))) == resolve(raw)


def test_a_kept_job_no_longer_needs_its_archive(tmp_path: Path) -> None:
    raw = tiny_job(tiny_data(tmp_path, name="mnist"), data={"name": "mnist", "archive": "gone"})
    run = tiny_run(tmp_path, raw)
    assert RunDirectory.open(run).job()["data"]["archive"]
    assert kept_job(RunDirectory.open(run)).data.archive is None


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"train": {"epoch": 3}}', "epoch: unknown key"), ("[]", "not a JSON object"), ("{", "not JSON")],
)
def test_a_damaged_job_is_named_by_its_file(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        kept_job(RunDirectory.open(tmp_path))
    assert str(tmp_path / "job.json") in str(caught.value)


# --- the plan ---


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, ["100 to train on, 20 for validation, 60 to test", "bsp with idpa", "3 increments", "200 presentations"]),
        ({"train": {"partition": "udpa"}}, ["bsp with udpa", "1 increments"]),
        ({"train": {"strategy": "layer", "batch_size": 30}}, ["layer: kernels", "8 steps"]),
        ({"cluster": {"workers": {"cpu": 3}}}, ["3 cpu", "1 for the parameter server", "on this machine"]),
        ({"cluster": {"scheduler": "tcp://a:1"}}, ["all there are, of the scheduler tcp://a:1"]),
        ({"cluster": {"scheduler_file": "s.json", "workers": "gpu=2"}}, ["2 gpu, of the scheduler s.json"]),
    ],
)
def test_the_plan_says_what_a_job_will_do(path: str, sections: dict[str, Any], words: list[str]) -> None:
    text = readable_plan(prepared(tiny_job(path, **sections)))
    for word in [*words, "MiB on each worker", "conv1", "im2col", "total"]:
        assert word in text


# --- from Python ---


def test_train_takes_tables_jobs_and_files(tmp_path: Path) -> None:
    missing = {"data": {"name": "mnist", "path": str(tmp_path / "no.zarr")}}
    file = tmp_path / "job.toml"
    file.write_text(f'[data]\nname = "mnist"\npath = "{tmp_path / "no.zarr"}"\n')
    for job in (missing, Job.model_validate(missing), str(file), file):
        with pytest.raises(DataError, match="no data set here"):
            daskcnn.train(None, job)
    with pytest.raises(JobError, match="unknown key"):
        daskcnn.train(None, {"train": {"epoch": 1}})


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="trian"):
        daskcnn.trian  # noqa: B018


BSP = {"strategy": "bsp", "lr": 0.02, "batch_size": 32}
FOUR, EACH = {"workers": {"cpu": 4}}, {"batch": "worker"}


@pytest.mark.parametrize(
    ("train", "rule", "cluster", "words"),
    [
        (BSP, {}, FOUR, "learning rate 0.02, 32 samples a step, shared by 4 workers by speed"),
        (
            BSP,
            EACH,
            FOUR,
            "learning rate 0.08 (0.02 for one replica), minibatches of 32 on 4 replicas: 128 samples a step",
        ),
        (BSP | {"optimizer": "adamw"}, EACH, FOUR, "learning rate 0.04 (0.02 for one replica)"),
        (BSP | {"replica_size": 2}, {}, FOUR, "learning rate 0.02, 32 samples a step, shared by 2 groups by speed"),
        (BSP, {}, {"scheduler": "tcp://h:1"}, "learning rate 0.02, 32 samples a step, schedule"),
        (BSP, EACH, {"scheduler": "tcp://h:1"}, "32 samples a step (more with more replicas: all workers"),
        (BSP | {"strategy": "sgwu"}, {}, FOUR, "learning rate 0.02, minibatches of 32"),
        (
            BSP | {"strategy": "downpour"},
            {"lower_lr": True},
            FOUR,
            "learning rate 0.0025 (0.02 for one replica), minibatches of 32 on 4 replicas",
        ),
        (BSP | {"strategy": "local-sgd"}, {}, FOUR, "learning rate 0.02, minibatches of 32"),
        (BSP | {"strategy": "layer"}, {}, FOUR, "learning rate 0.02, 32 samples a step"),
    ],
)
def test_plan_and_first_line_say_the_rate_that_replicas_step_by(
    path: str, train: dict[str, Any], rule: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    ready = prepared(tiny_job(path, train=train, rule=rule, cluster=cluster))
    assert words in readable_plan(ready)
    line = describe(start_event(ready, 4))[1]
    if "workers" in cluster:
        assert words in line
    elif rule:
        assert "learning rate 0.08 (0.02 for one replica)" in line
    else:
        assert "learning rate 0.02, 32 samples a step, shared by 4 workers by speed" in line


def test_a_plan_names_a_range_of_workers(path: str) -> None:
    words = "workers   2..8 cpu, 1 gpu, of the scheduler tcp://host:8786"
    cluster = {"workers": "cpu=2..8,gpu=1", "scheduler": "tcp://host:8786"}
    assert words in readable_plan(prepared(tiny_job(path, cluster=cluster)))
