"""The command line as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from daskcnn import __version__
from daskcnn.cli import main as daskcnn
from daskcnn.cli.command import tell
from daskcnn.cli.flags import FLAGS
from daskcnn.errors import ClusterError, Diverged, Interrupted, Lost
from daskcnn.job.resolve import resolve
from daskcnn.launch import jobs
from daskcnn.launch import training as runner
from daskcnn.nn.score import ClassScores, Score
from daskcnn.run import main as run
from daskcnn.runs.directory import RunDirectory
from daskcnn.store import open_dataset
from daskcnn.store.chunk_source import CACHE
from daskcnn.trained.place import find_network
from tests.command_lines import toml
from tests.special_files import SPECIAL, special
from tests.tiny_runs import CLASSES, random_state, tiny_data, tiny_job, tiny_run

Start = Callable[..., Result]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Work in an empty folder; whoever starts or joins a cluster is noted, and told that there is none."""
    monkeypatch.chdir(tmp_path)
    CACHE.clear()
    started: list[Any] = []

    def connect(settings: Any, *_: Any, **__: Any) -> None:
        started.append(settings)
        raise ClusterError("no cluster here")

    monkeypatch.setattr(runner, "connect", connect)
    yield started
    CACHE.clear()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return tiny_data(tmp_path)


def invoke(command: Any, *args: object) -> Result:
    result = CliRunner().invoke(command, [str(a) for a in args])
    if "--verbose" not in args:
        assert "Traceback" not in result.output
    return result


def refused(code: int, command: Any, *args: object) -> str:
    """What it says on stderr on ending with this code; stdout stays empty."""
    result = invoke(command, *args)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


def job_file(folder: Path, text: str) -> str:
    file = folder / "job.toml"
    file.write_text(text)
    return str(file)


def flags(raw: dict[str, Any]) -> list[str]:
    """The same tables as --set flags."""
    return [f"--set={s}.{k}={toml(v)}" for s, table in raw.items() for k, v in table.items()]


# --- the job: file, flags, --set ---


def resolved(monkeypatch: pytest.MonkeyPatch, *args: object) -> dict[str, Any]:
    """The job that a command line comes to."""
    seen: list[dict[str, Any]] = []

    def note(raw: dict[str, Any], **_: Any) -> dict[str, Any]:
        seen.append(resolve(raw).model_dump())
        return {}

    monkeypatch.setattr(jobs, "run", note)
    monkeypatch.setattr(import_module("daskcnn.cli.run"), "format_summary", lambda *_, **__: "")
    assert invoke(run, *args).exit_code == 0
    return seen[0]


def test_set_goes_before_flags_and_flags_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = job_file(tmp_path, "[train]\nepochs = 3\nlr = 0.3\nseed = 3\nmomentum = 0.5\n")
    args = [file, "--set", "train.epochs=5", "--set", "train.epochs=6", "--epochs", "4", "--lr", "0.4"]
    train = resolved(monkeypatch, *args)["train"]
    assert (train["epochs"], train["lr"], train["seed"], train["momentum"]) == (6, 0.4, 3, 0.5)
    assert train["batch_size"] == 64


def test_every_flag_reaches_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = {
        "dataset": "mnist",
        "data": "/d.zarr",
        "archive": "/a",
        "model": "6:9",
        "strategy": "agwu",
        "partition": "udpa",
        "epochs": "7",
        "batch-size": "9",
        "lr": "0.5",
        "seed": "11",
        "wait": "3",
        "scheduler": "tcp://a:1",
        "workers": "cpu=2,gpu=1",
        "only": "desk-*",
        "name": "5",
        "run-dir": "elsewhere",
        "time-limit": "3600",
    }
    assert FLAGS.keys() - args.keys() == {"scheduler-file"}  # it stands in the place of the scheduler
    job = resolved(monkeypatch, *(f"--{flag}={value}" for flag, value in args.items()))
    data, train, cluster = job["data"], job["train"], job["cluster"]
    assert (data["name"], data["path"], data["archive"], job["model"]["name"]) == ("mnist", "/d.zarr", "/a", "6:9")
    assert [train[key] for key in ("strategy", "partition", "epochs", "batch_size", "lr", "seed")] == [
        *("agwu", "udpa", 7, 9, 0.5, 11)
    ]
    assert (cluster["scheduler"], cluster["workers"], cluster["wait"]) == ("tcp://a:1", {"cpu": 2, "gpu": 1}, 3.0)
    assert cluster["only"] == ["desk-*"]
    assert job["run"]["name"] == "5"  # a name, not a number
    assert (job["run"]["dir"], job["run"]["time_limit"]) == ("elsewhere", 3600.0)
    file = resolved(monkeypatch, "--scheduler-file", "s.json")["cluster"]
    assert (file["scheduler"], file["scheduler_file"]) == (None, "s.json")


def test_all_problems_of_file_and_flags_come_at_once(nothing_starts: list[Any], tmp_path: Path) -> None:
    file = job_file(tmp_path, "[trian]\nepochs = 3\n[data]\nlimt = 5\n[model]\nname = 'quikc'\n")
    told = refused(2, run, file, "--epochs", "ten", "--lr", "-1", "--set", "train.strategy=sgwuu", "--workers", "3")
    for problem in (
        "the job has 7 problems",
        "trian: unknown section; did you mean 'train'?",
        "data.limt: unknown key; did you mean 'limit'?",
        'model.name: model "quikc"',
        "train.epochs = 'ten': input should be a valid integer",
        "train.lr = -1: input should be greater than 0",
        "train.strategy = 'sgwuu': no such strategy; did you mean 'sgwu'?",
        "cluster.workers = '3': write cpu=2",
    ):
        assert problem in told
    assert nothing_starts == []
    assert sorted(os.listdir()) == ["job.toml"]


@pytest.mark.parametrize("setting", ["epochs=3", "train", "train.epochs", "=3"])
def test_a_malformed_setting_is_shown_with_the_right_form(setting: str) -> None:
    assert "write section.key=value, for example train.epochs=5" in refused(2, run, "--set", setting)


@pytest.mark.parametrize("setting", ["tr\udcffain.lr=1", "train.l\udcffr=1"])
def test_a_setting_in_another_encoding_is_named(setting: str) -> None:
    assert r"\udcff" in (told := refused(2, run, "--set", setting))
    assert "is no text in UTF-8" in told


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope.toml"], "nope.toml: No such file or directory; give the path of a job file"),
        (["--epochz", "3"], "Did you mean '--epochs'"),
        (["--epochs"], "requires an argument"),
        (["a.toml", "b.toml"], "unexpected extra argument"),
    ],
)
def test_a_wrong_command_line(args: list[str], words: str) -> None:
    assert words in refused(2, run, *args)


# --- how it ends ---


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ClusterError("no scheduler"), 3),
        (Diverged("loss = nan"), 4),
        (Lost("the last worker is gone"), 5),
        (Interrupted("signal 2", 2), 130),
        (Interrupted("signal 15", 15), 143),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("oh"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(jobs, "run", fail)
    assert str(error) in refused(code, run)
    assert ("Traceback" in refused(code, run, "--verbose")) == (not isinstance(error, KeyboardInterrupt))


def test_a_bug_is_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "run", lambda *_, **__: 1 / 0)
    told = refused(1, run)
    assert "internal error: ZeroDivisionError: division by zero" in told
    assert "run again with --verbose" in told


@pytest.mark.parametrize("args", [["report"], ["logs"], ["plan"], ["data", "prepare", "synthetic", "--out"]])
def test_a_path_that_the_system_refuses_is_no_bug(args: list[str]) -> None:
    assert "File name too long" in refused(2, daskcnn, *args, "x" * 300)


def test_without_a_cluster_nothing_is_left_behind(nothing_starts: list[Any], path: str) -> None:
    told = refused(3, run, *flags(tiny_job(path)), "--json")
    assert "no cluster here" in told
    assert len(nothing_starts) == 1
    assert not Path("runs").exists()


# --- data that are wrong are named before anything starts ---


def chunk_file(path: str, array: str, index: int) -> Path:
    (found,) = Path(path, array).glob(f"c/{index}" if array.endswith("labels") else f"c/{index}/*/*/*")
    return found


def damage(path: str, kind: str) -> None:
    images, labels = chunk_file(path, "train/images", 1), chunk_file(path, "test/labels", 0)
    match kind:
        case "missing chunk":
            images.unlink()
        case "truncated chunk":
            images.write_bytes(images.read_bytes()[:-1])
        case "flipped bit":
            content = bytearray(images.read_bytes())
            content[5] ^= 1
            images.write_bytes(content)
        case "label":
            content = bytearray(labels.read_bytes())
            content[3] = 77
            labels.write_bytes(content)
        case "missing array":
            shutil.rmtree(Path(path, "test/images"))
        case "manifest":
            file = Path(path, "zarr.json")
            file.write_text(file.read_text().replace('"samples": 120', '"samples": 119'))


DAMAGES = [
    ("missing chunk", "train/images, chunk 1 (samples 50 to 99) is missing; make the data set again"),
    ("truncated chunk", "train/images, chunk 1 (samples 50 to 99) has 9599 bytes instead of 9600"),
    ("flipped bit", "train/images, chunk 1 (samples 50 to 99) does not match its checksum"),
    ("label", "test/labels, chunk 0 (samples 0 to 49) does not match its checksum"),
    ("missing array", "array test/images is missing; make the data set again"),
    ("manifest", "the manifest does not match its checksum"),
]


@pytest.mark.parametrize(("kind", "words"), DAMAGES)
def test_a_damaged_data_set_is_named(nothing_starts: list[Any], path: str, kind: str, words: str) -> None:
    damage(path, kind)
    told = refused(2, run, *flags(tiny_job(path)))
    assert f"{path}: {words}" in told
    assert words in refused(2, daskcnn, "data", "verify", path)
    assert nothing_starts == []
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"name": "cifar10"}}, "holds synthetic, the job wants cifar10; set data.name or data.path"),
        ({"data": {"order": "stored"}}, "is stored in order 'shuffled', the job wants 'stored'"),
        ({"data": {"validation": 120}}, "data.validation = 120: leaves nothing of 120 training samples; lower it"),
        ({"data": {"limit": 1}}, "one class only; raise data.limit"),
        ({"model": {"layers": [{"layer": "dense", "units": 3}]}}, "end it with a dense layer of 10 units"),
        ({"run": {"dir": "file"}}, "no folder that may be written; set run.dir"),
        ({"run": {"name": "taken"}}, "exists already; choose another run.name"),
    ],
)
def test_a_job_and_data_that_do_not_go_together(
    nothing_starts: list[Any], path: str, sections: dict[str, Any], words: str
) -> None:
    Path("file").write_text("")
    Path("runs/taken").mkdir(parents=True)
    assert words in refused(2, run, *flags(tiny_job(path, **sections)))
    assert nothing_starts == []


def cifar_folder(folder: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The official files with ten records each, changed."""
    records = np.random.default_rng(0).integers(0, 256, (10, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(10)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    files = {"batches.meta.txt": " ".join(CLASSES).encode(), **dict.fromkeys(names, records.tobytes())}
    change(files)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def wrong_label(files: dict[str, bytes]) -> None:
    content = bytearray(files["data_batch_3.bin"])
    content[2 * 3073] = 11
    files["data_batch_3.bin"] = bytes(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_label, "data_batch_3.bin, record 2: label 11, labels are 0 to 9"),
        (lambda files: files.update({"data_batch_2.bin": b"x" * 5000}), "data_batch_2.bin, record 1: 1927 bytes"),
        (lambda files: files.update({"test_batch.bin": b""}), "test_batch.bin, record 0: 0 bytes"),
        (lambda files: files.pop("data_batch_5.bin"), "data_batch_5.bin missing"),
    ],
    ids=["label", "truncated", "empty", "missing"],
)
def test_a_wrong_archive_is_named(nothing_starts: list[Any], tmp_path: Path, change: Any, words: str) -> None:
    archive = cifar_folder(tmp_path / "cifar", change)
    assert words in refused(2, run, "--dataset", "cifar10", "--archive", archive, "--data", tmp_path / "out.zarr")
    assert words in refused(2, daskcnn, "data", "prepare", "cifar10", "--archive", archive, "--out", "o.zarr")
    assert nothing_starts == []
    assert sorted(os.listdir()) == ["cifar"]


# --- --dry-run and --json ---


def test_a_dry_run_prints_job_and_plan_and_starts_nothing(nothing_starts: list[Any], path: str) -> None:
    result = invoke(run, *flags(tiny_job(path)), "--dry-run")
    assert result.exit_code == 0
    job, end = json.JSONDecoder().raw_decode(result.stdout)
    named = {"name": "synthetic", "augment": "none"}
    assert job == resolve(tiny_job(path, data=named, train={"loss": "softmax"})).model_dump(mode="json")
    assert "100 to train on, 20 for validation" in result.stdout[end:]
    assert nothing_starts == []
    assert not Path("runs").exists()


def test_a_dry_run_in_json_keeps_stdout_json(path: str) -> None:
    result = invoke(run, *flags(tiny_job(path)), "--dry-run", "--json")
    assert json.loads(result.stdout)["train"]["increments"] == 3
    assert "100 to train on" in result.stderr


@pytest.mark.parametrize(
    ("options", "told", "samples"),
    [
        (
            ["--dataset", "cifar10"],
            "downloaded from https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (170,052",
            48_000,
        ),
        (["--dataset", "fashion-mnist"], "train-images-idx3-ubyte.gz (26,421,880 bytes), https://", 58_000),
        (
            ["--dataset", "synthetic", "--set", "train.class_weights=balanced"],
            "it will be generated and written",
            7_200,
        ),
        (
            ["--dataset", "cifar100", "--archive", "a.tar.gz", "--data", "x.zarr"],
            "a.tar.gz and written there when the run starts",
            48_000,
        ),
    ],
)
def test_a_dry_run_downloads_and_writes_nothing(
    options: list[str], told: str, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.tar.gz").touch()
    monkeypatch.setattr("daskcnn.store.datasets.archive.urlopen", lambda *_, **__: pytest.fail("the network is used"))
    done = invoke(run, *options, "--dry-run")
    assert f"prepare   {options[1]} is not at " in done.stdout
    assert told in done.stdout
    assert f"{samples:,} to train on" in done.stdout
    assert os.listdir(tmp_path) == ["a.tar.gz"]


def test_a_dry_run_refuses_a_data_set_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "mnist is not downloaded; give --archive FOLDER" in refused(2, run, "--dataset", "mnist", "--dry-run")
    told = refused(2, run, "--dataset", "mnist", "--archive", "none", "--dry-run")
    assert "none: there is no such file or folder; correct data.archive" in told
    assert os.listdir(tmp_path) == []


def test_a_dry_run_finds_what_is_wrong(path: str) -> None:
    assert "lower it" in refused(2, run, *flags(tiny_job(path, data={"validation": 500})), "--dry-run")


def test_the_summary_as_json_and_as_text(tmp_path: Path, path: str) -> None:
    place = tiny_run(tmp_path / "runs", tiny_job(path), status="done")
    result = invoke(run, "--resume", place, "--json")
    assert json.loads(result.stdout)["run"] == str(place)
    assert "nothing to resume" in result.stderr
    text = invoke(run, "--resume", place).stdout
    assert "accuracy 50.0 %" in text
    assert str(place) in text


# --- --resume ---


def test_a_run_that_is_named_without_its_folder_is_known(tmp_path: Path, path: str) -> None:
    tiny_run(tmp_path / "runs", tiny_job(path), status="done")
    for command in ([run, "--resume", "run"], [daskcnn, "report", "run"], [daskcnn, "predict", "run", "x.png"]):
        assert "did you mean runs/run?" in refused(2, *command)


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    assert "nowhere: no run there; give the folder" in refused(2, run, "--resume", "nowhere")
    assert "no run there" in refused(2, run, "--resume", tmp_path)


def test_a_resumed_run_keeps_its_job(tmp_path: Path, path: str, nothing_starts: list[Any]) -> None:
    place = tiny_run(tmp_path, tiny_job(path))
    told = refused(2, run, "--resume", place, "--lr", "9", "--epochs", "9", "--data", "x", "--wait", "3")
    may = "only train.epochs, run.time_limit, [cluster] and the data's places (data.path, data.images, …) may change"
    assert f"train.lr = 9.0: the run {place} has 0.02; {may}" in told
    assert "[cluster]:" not in told
    assert "train.epochs:" not in told
    assert nothing_starts == []


def test_what_the_run_has_may_be_given_again(tmp_path: Path, path: str, nothing_starts: list[Any]) -> None:
    raw = tiny_job(path, run={"name": "run", "dir": str(tmp_path / "runs")})
    place = tiny_run(tmp_path / "runs", raw, random_state(resolve(raw)), status="stopped")
    refused(3, run, *flags(raw), "--resume", place, "--scheduler", "tcp://a:1")
    assert len(nothing_starts) == 1, "as far as the cluster"


def test_each_life_of_a_run_may_have_a_time_limit_of_its_own(tmp_path: Path, path: str) -> None:
    raw = tiny_job(path, run={"name": "run", "dir": str(tmp_path / "runs"), "time_limit": "2h"})
    place = tiny_run(tmp_path / "runs", raw, random_state(resolve(raw)), status="stopped")
    for given, seconds in ((), 7200.0), (("--time-limit", "90m"), 5400.0):
        planned = invoke(run, "--resume", place, *given, "--dry-run").stdout
        assert json.loads(planned.partition("\n\ndata ")[0])["run"]["time_limit"] == seconds


@pytest.mark.parametrize("end", ["stdout", "stderr"])
def test_a_terminal_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    own, terminal = os.openpty()
    os.close(own)
    with open(terminal, "w") as stream:
        monkeypatch.setattr(sys, end, stream)
        tell("trained", err=end == "stderr")
        stream.flush()


@pytest.mark.parametrize("end", ["stdout", "stderr"])
def test_a_character_that_the_terminal_lacks_is_a_question_mark(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """An arrow in Latin-1."""
    stream = io.TextIOWrapper(there := io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, end, stream)
    tell("büro → start it", err=end == "stderr")
    stream.flush()
    assert there.getvalue().decode("latin-1") == "büro ? start it\n"


@pytest.mark.parametrize("end", ["stdout", "stderr"])
def test_a_stream_that_was_closed_before_the_start_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, end: str
) -> None:
    """Python has none then: `daskcnn run >&-`."""

    def code(*args: str) -> Any:
        monkeypatch.setattr(sys, end, None)
        with pytest.raises(SystemExit) as ended:
            run.main([*args])
        return ended.value.code

    assert code(*flags(tiny_job(path))) == 3, "as far as the cluster"
    out, err = capsys.readouterr()
    assert (out, "no cluster here" in err) == ("", end == "stdout")
    monkeypatch.setattr(jobs, "run", lambda *_, **__: {})
    monkeypatch.setattr(import_module("daskcnn.cli.run"), "format_summary", lambda *_, **__: "trained")
    assert not code("--quiet")
    assert ("trained" in capsys.readouterr().out) == (end == "stderr")


def test_a_run_that_is_done_is_trained_longer(tmp_path: Path, path: str, nothing_starts: list[Any]) -> None:
    raw = tiny_job(path)
    place = tiny_run(tmp_path / "runs", raw, random_state(resolve(raw)), status="done")
    refused(3, run, "--resume", place, "--epochs", "4", "--scheduler", "tcp://a:1")
    assert len(nothing_starts) == 1
    assert json.loads((place / "job.json").read_text())["train"]["epochs"] == 2, "it is kept once there are workers"
    planned = invoke(run, "--resume", place, "--epochs", "4", "--dry-run").stdout
    assert json.loads(planned.partition("\n\ndata ")[0])["train"]["epochs"] == 4


@pytest.mark.parametrize("epochs", [1, 2])
def test_fewer_epochs_than_were_trained_are_refused(tmp_path: Path, path: str, epochs: int) -> None:
    raw = tiny_job(path, train={"epochs": 3})
    place = tiny_run(tmp_path / "runs", raw, replace(random_state(resolve(raw)), epoch=2.0))
    told = refused(2, run, "--resume", place, "--epochs", epochs)
    assert f"train.epochs = {epochs}: the run has trained 2 epochs already; give more" in told


def test_auto_trains_longer_but_never_shorter(tmp_path: Path, path: str, nothing_starts: list[Any]) -> None:
    raw = tiny_job(path, run={"name": "run", "dir": str(tmp_path / "runs")})
    tiny_run(tmp_path / "runs", raw, random_state(resolve(raw)))
    file = job_file(tmp_path, f"[data]\npath = '{path}'\nvalidation = 20\n[run]\nname = 'run'\n")
    auto = run, file, "--run-dir", tmp_path / "runs", "--resume", "auto", "--epochs"
    assert "train.epochs = 1: ignored, the run" in refused(3, *auto, 1)
    assert "train.epochs" not in refused(3, *auto, 4)
    other = refused(3, *auto, 4, "--seed", 77)
    assert "train.seed = 77: ignored" in other
    assert "train.epochs = 4: ignored" in other, "it may be another job's run"
    planned = invoke(*auto, 4, "--dry-run").stdout
    assert json.loads(planned.partition("\n\ndata ")[0])["train"]["epochs"] == 4


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "layer"])
def test_a_run_of_every_strategy_may_be_resumed_elsewhere(
    tmp_path: Path, path: str, nothing_starts: list[Any], strategy: str
) -> None:
    cluster = {"scheduler": "tcp://a:1", "workers": {"cpu": 3}, "wait": 7}
    raw = tiny_job(path, train={"strategy": strategy, "momentum": 0}, cluster=cluster)
    place = tiny_run(tmp_path, raw)
    refused(3, run, "--resume", place)
    refused(3, run, "--resume", place, "--scheduler-file", "s.json", "--workers", "cpu=1")
    kept, moved = nothing_starts
    assert (kept.scheduler, kept.workers.given, kept.wait) == ("tcp://a:1", {"cpu": 3}, 7)
    assert (moved.scheduler, moved.scheduler_file, moved.workers.given, moved.wait) == (None, "s.json", {"cpu": 1}, 7)


@pytest.mark.parametrize("given", ["2..8", "cpu=2..8"])
def test_a_range_to_adapt_to_sets_two_keys(path: str, nothing_starts: list[Any], given: str) -> None:
    refused(3, run, "--data", path, "--adapt", given)
    (cluster,) = nothing_starts
    assert (cluster.workers.text, cluster.adapt) == ("cpu=2..8", True)


def test_a_range_to_adapt_to_is_the_number_of_workers_and_needs_a_cluster(path: str) -> None:
    assert "give one of them" in refused(2, run, "--data", path, "--adapt", "2..8", "--workers", "cpu=2")
    for dry in ([], ["--dry-run"]):
        told = refused(3, run, "--data", path, "--adapt", "2..8", "--scheduler", "tcp://127.0.0.1:1", *dry)
        assert "an address cannot be asked for workers" in told
        assert "daskcnn.train(Client(cluster), job)" in told


def test_resuming_checks_the_cluster_that_is_asked_for(tmp_path: Path, path: str) -> None:
    place = tiny_run(tmp_path, tiny_job(path))
    told = refused(2, run, "--resume", place, "--set", "cluster.shceduler=x", "--workers", "cpu=0")
    assert "did you mean 'scheduler'?" in told
    assert "cluster.workers = 0" in told


def test_a_damaged_job_is_no_bug(tmp_path: Path, path: str) -> None:
    place = tiny_run(tmp_path, tiny_job(path), status="lost")
    (place / "job.json").write_text('{"train": {"epoch": 3}}')
    for command in ([run, "--resume", place], [daskcnn, "evaluate", place], [daskcnn, "predict", place, "x.png"]):
        assert f"{place / 'job.json'}: train.epoch: unknown key" in refused(2, *command)


def test_a_run_that_is_being_written_is_not_resumed(tmp_path: Path, path: str, nothing_starts: list[Any]) -> None:
    place = tiny_run(tmp_path, tiny_job(path))
    with RunDirectory.open(place, writable=True):
        assert "being written by process" in refused(3, run, "--resume", place)
    assert nothing_starts == []


def test_auto_starts_anew_or_goes_on(tmp_path: Path, path: str, nothing_starts: list[Any]) -> None:
    args = [*flags(tiny_job(path)), "--resume", "auto", "--run-dir", "runs"]
    refused(3, run, *args)  # none there: a new run, as far as the cluster
    tiny_run(tmp_path / "runs", tiny_job(path, cluster={"wait": 8}), status="done")
    result = invoke(run, *args)
    assert "nothing to resume" in result.stderr
    assert "warning" not in result.stderr
    edited = invoke(run, *args, "--seed", "77").stderr
    assert "warning: train.seed = 77: ignored, the run" in edited
    assert "another run.name starts anew" in edited
    other = [*args, "--name", "other"]  # of this name there is none
    refused(3, run, *other)
    assert [settings.wait for settings in nothing_starts] == [60, 60]


# --- daskcnn evaluate ---


@pytest.fixture
def trained(tmp_path: Path, path: str) -> Path:
    """A run with two checkpoints, the first one the better."""
    raw = tiny_job(path)
    states = [random_state(resolve(raw), seed=s, step=s, validation=Score(1.0, 9 - s, 20)) for s in (1, 2)]
    return tiny_run(tmp_path / "runs", raw, *states)


def test_evaluate(trained: Path, path: str) -> None:
    result = invoke(daskcnn, "evaluate", trained, "--json")
    found = json.loads(result.stdout)
    assert (found["samples"], found["data"], found["run"]) == (60, path, str(trained))
    assert found["checkpoint"].endswith("step-000000002")
    assert 0 <= found["accuracy"] <= 1
    assert found["loss"] > 0
    text = invoke(daskcnn, "evaluate", trained).stdout
    top = f"accuracy {100 * found['accuracy']:.2f} %, top-5 {100 * found['top5']:.2f} %"
    scores = f"{top}, loss {found['loss']:.4f}, AUC {found['auc']:.4f}"
    assert f"{scores} on 60 test samples" in text


def test_evaluate_gives_the_auc_of_the_probabilities(trained: Path, path: str) -> None:
    network = find_network(str(trained), "last", print).classifier
    images, labels = open_dataset(path).test.read(0, 60)
    expected = ClassScores(network.predict(images), labels).auc
    assert json.loads(invoke(daskcnn, "evaluate", trained, "--json").stdout)["auc"] == pytest.approx(expected)


def test_evaluate_the_best(trained: Path) -> None:
    best = json.loads(invoke(daskcnn, "evaluate", trained, "--checkpoint", "best", "--json").stdout)
    last = json.loads(invoke(daskcnn, "evaluate", trained, "--json").stdout)
    assert best["checkpoint"].endswith("step-000000001")
    assert best["loss"] != last["loss"]


def test_evaluate_on_other_data(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tiny_data(tmp_path / "other", test=30)
    assert json.loads(invoke(daskcnn, "evaluate", trained, "--data", other, "--json").stdout)["samples"] == 30
    wrong = tiny_data(tmp_path / "other", name="wrong", shape=(4, 4, 3))
    told = refused(2, daskcnn, "evaluate", trained, "--data", wrong)
    assert f"{wrong}: images of 4×4×3, and {trained} was trained on 8×8×3; give a data set" in told


def test_evaluate_names_what_is_not_there(trained: Path, tmp_path: Path, path: str) -> None:
    assert "no trained network there" in refused(2, daskcnn, "evaluate", tmp_path)
    shutil.move(path, f"{path}.away")
    assert f"{path}: no data set here" in refused(2, daskcnn, "evaluate", trained)
    shutil.rmtree(trained / "checkpoints")
    assert "no checkpoint yet; wait for the first epoch" in refused(2, daskcnn, "evaluate", trained)


def test_evaluate_passes_over_a_damaged_checkpoint(trained: Path) -> None:
    last, first = sorted((trained / "checkpoints").iterdir(), reverse=True)
    (last / "arrays.safetensors").write_bytes(b"")
    result = invoke(daskcnn, "evaluate", trained, "--json")
    assert json.loads(result.stdout)["checkpoint"] == str(first)
    assert f"passed over: {last}" in result.stderr
    (first / "state.json").write_bytes(b"{}")
    assert "no checkpoint is whole" in refused(2, daskcnn, "evaluate", trained)


def test_evaluate_names_a_damaged_chunk(trained: Path, path: str) -> None:
    chunk_file(path, "test/images", 1).unlink()
    assert "test/images, chunk 1 (samples 50 to 59) is missing" in refused(2, daskcnn, "evaluate", trained)


# --- daskcnn predict ---


def picture(name: str, size: tuple[int, int] = (8, 8), mode: str = "RGB", seed: int = 0) -> str:
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
    Image.fromarray(pixels).save(name)
    return name


def test_predict(trained: Path) -> None:
    files = [picture("a.png", seed=1), picture("b.bmp", seed=2)]
    result = invoke(daskcnn, "predict", trained, *files, "--json")
    assert result.stderr == f"weights: {trained}/checkpoints/step-000000002 (last, epoch 1.5)\n"
    found = json.loads(result.stdout)
    assert [f["image"] for f in found] == files
    for prediction in found:
        chances = [c["probability"] for c in prediction["classes"]]
        assert len(chances) == 3
        assert chances == sorted(chances, reverse=True)
        assert {c["class"] for c in prediction["classes"]} <= set(CLASSES)
    assert found[0]["classes"] != found[1]["classes"]


def test_predict_in_words(trained: Path) -> None:
    text = invoke(daskcnn, "predict", trained, picture("a.png"), "--top", "10").stdout
    assert re.fullmatch(r"a\.png: (\w [\d.]+ %(; )?){10}\n", text)
    assert sum(float(chance) for chance in re.findall(r"([\d.]+) %", text)) == pytest.approx(100, abs=0.6)


@pytest.mark.parametrize(("size", "mode"), [((30, 20), "RGB"), ((8, 8), "L"), ((8, 8), "RGBA"), ((5, 3), "L")])
def test_predict_converts_and_says_when_it_resizes(trained: Path, size: tuple[int, int], mode: str) -> None:
    result = invoke(daskcnn, "predict", trained, picture("a.png", size, mode))
    assert result.exit_code == 0
    resized = f"warning: a.png: {size[0]}x{size[1]} pixels, resized to 8x8"
    assert (resized in result.stderr) == (size != (8, 8))


def test_predict_into_nothing_takes_no_folder(trained: Path) -> None:
    told = refused(2, daskcnn, "predict", trained, trained)
    assert f"{trained}: a folder, a data set or an array, not an image file; say where to write: --out p.csv" in told


def test_predict_on_grey_images(tmp_path: Path) -> None:
    raw = tiny_job(tiny_data(tmp_path, name="mnist", shape=(8, 8, 1)), data={"name": "mnist"})
    grey = tiny_run(tmp_path, raw, random_state(resolve(raw)))
    result = invoke(daskcnn, "predict", grey, picture("a.png"), picture("b.png", mode="L"))
    assert result.exit_code == 0
    assert result.stdout.count("%") == 6


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    """A run whose network looks at images of twelve channels."""
    raw = tiny_job(tiny_data(tmp_path, shape=(8, 8, 12)))
    return tiny_run(tmp_path, raw, random_state(resolve(raw)))


def test_predict_on_other_channels_names_what_the_network_needs(twelve: Path) -> None:
    told = refused(2, daskcnn, "predict", twelve, picture("a.png"))
    assert "a.png: the network looks at images of 12 channels, which image files do not have" in told
    assert "give a .npy file of uint8 (8, 8, 12)" in told


@pytest.mark.parametrize("order", ["C", "F"])
def test_predict_on_arrays(twelve: Path, order: Any) -> None:
    values = np.random.default_rng(0).integers(0, 256, (8, 8, 12), dtype=np.uint8)
    np.save("a.npy", np.asarray(values, order=order))
    found = json.loads(invoke(daskcnn, "predict", twelve, "a.npy", "--top", "10", "--json").stdout)
    network = find_network(str(twelve), "last", pytest.fail).classifier
    expected = network.predict(values[None])[0]
    chances = {c["class"]: c["probability"] for c in found[0]["classes"]}
    np.testing.assert_allclose([chances[name] for name in CLASSES], expected, rtol=1e-5)


def test_predict_takes_an_array_for_an_image(trained: Path) -> None:
    np.save("a.npy", np.asarray(Image.open(picture("a.png"))))
    found = json.loads(invoke(daskcnn, "predict", trained, "a.npy", "a.png", "--json").stdout)
    assert found[0]["classes"] == found[1]["classes"]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((8, 8, 12), np.float32), "float32 of shape (8, 8, 12); give uint8 of shape (8, 8, 12)"),
        (np.zeros((8, 8, 3), np.uint8), "uint8 of shape (8, 8, 3); give uint8 of shape (8, 8, 12)"),
        (np.array([None]), "object of shape (1,)"),
    ],
)
def test_predict_refuses_other_arrays(twelve: Path, array: Any, words: str) -> None:
    np.save("a.npy", array)
    assert f"a.npy: {words}" in refused(2, daskcnn, "predict", twelve, "a.npy")


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x05\x00{[((", b"\x93NUMPY\x09\x00abc", b"PK"]
)
def test_predict_refuses_what_is_no_array(twelve: Path, content: bytes) -> None:
    Path("a.npy").write_bytes(content)
    assert "a.npy: not an array file that can be read" in refused(2, daskcnn, "predict", twelve, "a.npy")


def test_predict_refuses_a_truncated_array(twelve: Path) -> None:
    np.save("a.npy", np.zeros((8, 8, 12), np.uint8))
    Path("a.npy").write_bytes(Path("a.npy").read_bytes()[:-1])
    assert "a.npy: 767 bytes of data, truncated" in refused(2, daskcnn, "predict", twelve, "a.npy")
    assert "b.npy: there is no such file; correct the path" in refused(2, daskcnn, "predict", twelve, "b.npy")


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["a.png", "a.npy"])
def test_predict_opens_regular_files_only(trained: Path, kind: str, name: str) -> None:
    special(Path(name), kind)
    assert f"{name}: a {SPECIAL[kind]}, not a regular file" in refused(2, daskcnn, "predict", trained, name)


def test_names_from_outside_do_not_drive_the_terminal(trained: Path) -> None:
    evil = "a\x1b[2J\n\u202e.png"
    good = invoke(daskcnn, "predict", trained, picture(evil))
    assert good.stdout.startswith(r"a\x1b[2J \u202e.png: ")
    assert good.stdout.count("\n") == 1
    told = refused(2, daskcnn, "predict", trained, "b" + evil)
    assert r"ba\x1b[2J\n\u202e.png: there is no such file" in told
    assert json.loads(invoke(daskcnn, "predict", trained, evil, "--json").stdout)[0]["image"] == evil


def test_a_name_that_is_no_utf_8_is_printed_all_the_same(trained: Path) -> None:
    name = os.fsdecode(b"a\xff.png")
    Path(name).write_bytes(Path(picture("b.png")).read_bytes())
    assert r"a\udcff.png: " in invoke(daskcnn, "predict", trained, name).stdout


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("text.png", b"hello", "cannot identify image file"),
        ("empty.png", b"", "cannot identify image file"),
        ("page.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "cannot identify image"),
    ],
)
def test_predict_names_what_is_no_image(trained: Path, name: str, content: bytes, words: str) -> None:
    Path(name).write_bytes(content)
    told = refused(2, daskcnn, "predict", trained, picture("good.png"), name)
    assert f"{name}: not an image that can be read" in told
    assert words in told
    assert "give a PNG or JPEG file" in told


def test_predict_names_a_file_that_is_not_there(trained: Path) -> None:
    told = refused(2, daskcnn, "predict", trained, picture("good.png"), "missing.png")
    assert "missing.png: there is no such file; correct the path" in told


def test_predict_names_a_truncated_image(trained: Path) -> None:
    file = Path(picture("a.png"))
    file.write_bytes(file.read_bytes()[:-60])
    assert "a.png: not an image that can be read" in refused(2, daskcnn, "predict", trained, file)


@pytest.mark.parametrize("times", [1.5, 3])
def test_predict_refuses_a_decompression_bomb(trained: Path, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Pillow only warns up to twice its limit."""
    file = picture("a.png", (30, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(600 / times))
    assert "a.png: too large for an image to look at" in refused(2, daskcnn, "predict", trained, file)


# --- daskcnn data ---


def test_prepare_and_verify(tmp_path: Path) -> None:
    archive = cifar_folder(tmp_path / "cifar", lambda files: None)
    args = ["data", "prepare", "cifar10", "--archive", archive, "--out", "c.zarr"]
    assert "wrote c.zarr: cifar10, 50 training and 10 test images" in invoke(daskcnn, *args).stdout
    assert "already holds it" in invoke(daskcnn, *args).stdout
    assert invoke(daskcnn, "data", "verify", "c.zarr").stdout.startswith("c.zarr: cifar10, 50 + 10 images")
    assert "already holds a data set" in refused(2, daskcnn, *args, "--seed", "5")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["prepare", "imagenet"],
            "data set 'imagenet' is unknown; one of: cifar10, cifar100, fashion-mnist, mnist, synthetic",
        ),
        (["prepare", "mnist"], "mnist is not downloaded; give --archive FOLDER"),
        (["prepare", "mnist", "--archive", "nowhere"], "missing"),
        (["prepare", "synthetic", "--archive", "x"], "built in and takes no archive"),
        (["prepare", "synthetic", "--seed", "-1"], "-1"),
        (["prepare", "synthetic", "--order", "sorted"], "sorted"),
        (["prepare", "synthetic", "--out", "file"], "is a file, not a folder; choose another place (--out)"),
        (["verify", "nowhere"], "nowhere: no data set here; check the path, or make a data set with"),
    ],
)
def test_wrong_data_commands(args: list[str], words: str) -> None:
    Path("file").write_text("")
    assert words in refused(2, daskcnn, "data", *args)


# --- daskcnn doctor ---


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 50 << 30}))
    result = invoke(daskcnn, "doctor")
    assert result.exit_code == 0
    assert re.search(r"^ok +disk", result.stdout, re.MULTILINE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    result = invoke(daskcnn, "doctor", "--json")
    assert result.exit_code == 3
    (bad,) = [finding for finding in json.loads(result.stdout) if not finding["ok"]]
    assert bad["check"] == "disk"
    assert bad["remedy"]


def test_doctor_without_a_scheduler(silent_port: int) -> None:
    result = invoke(daskcnn, "doctor", "--scheduler", f"tcp://127.0.0.1:{silent_port}", "--wait", "1")
    assert result.exit_code == 3
    assert re.search(
        rf"^NO +scheduler +scheduler tcp://127.0.0.1:{silent_port}: cannot be reached", result.stdout, re.M
    )
    assert "dask scheduler" in result.stdout


def test_doctor_waits_no_less_than_nothing() -> None:
    assert "-1" in refused(2, daskcnn, "doctor", "--wait", "-1")


def test_a_wrong_job_is_told_in_a_line_for_each_problem() -> None:
    assert (
        refused(2, run, "--epochs", "ten")
        == "error: the job has a problem:\n  train.epochs = 'ten': input should be a valid integer\n"
    )


# --- as real processes ---


def process(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_no_scheduler_in_a_process_of_its_own(path: str, silent_port: int) -> None:
    address = f"tcp://127.0.0.1:{silent_port}"
    found = process("daskcnn.run", *flags(tiny_job(path)), "--scheduler", address, "--wait", "1", "--json")
    assert (found.returncode, found.stdout) == (3, "")
    assert f"scheduler {address}: cannot be reached" in found.stderr
    assert "start one with `dask scheduler`" in found.stderr
    assert "Traceback" not in found.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("signum", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_while_it_waits_for_a_scheduler(
    path: str, silent_port: int, signum: signal.Signals, code: int
) -> None:
    address = f"tcp://127.0.0.1:{silent_port}"
    command = [sys.executable, "-m", "daskcnn.run", *flags(tiny_job(path)), "--scheduler", address, "--wait", "100"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        assert job.stderr.readline() == "data: check\n"
        job.send_signal(signum)
        told = job.stderr.read()
        assert job.wait(timeout=60) == code
    words = {signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGTERM: "a request to end (SIGTERM)"}[signum]
    assert f"error: interrupted by {words} before training began" in told
    assert "Traceback" not in told


def test_dask_finds_the_command_line() -> None:
    (plug_in,) = entry_points(group="dask_cli", name="cnn")
    assert plug_in.load() is daskcnn


def test_it_runs_as_a_module_where_the_command_is_not_on_the_path() -> None:
    found = process("daskcnn", "--version")
    assert (found.returncode, found.stdout) == (0, f"daskcnn, version {__version__}\n")


@pytest.mark.slow
def test_it_is_a_plug_in_of_dask() -> None:
    found = process("dask", "cnn", "--version")
    assert (found.returncode, found.stdout) == (0, f"daskcnn, version {__version__}\n")


def every_command(command: click.Command, path: tuple[str, ...] = ("daskcnn",)) -> Iterator[tuple[str, click.Command]]:
    """The command and those below it, by the words that call them."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from every_command(inner, (*path, name))


@pytest.mark.parametrize(
    ("words", "command"), [*every_command(daskcnn), ("run", run)], ids=lambda given: str(given)[:40]
)
def test_help_cuts_no_sentence(words: str, command: click.Command) -> None:
    found = CliRunner().invoke(command, ["--help"], prog_name=words, terminal_width=80)
    assert found.exit_code == 0
    lines = [line for line in found.output.splitlines() if not line.startswith("Usage:")]
    assert not [line for line in lines if line.endswith(("...", "…"))]
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            sentence = str(inner.help).partition("\n\n")[0].split(". ")[0].removesuffix(".")
            assert " ".join(sentence.split()) in " ".join(found.output.split())
