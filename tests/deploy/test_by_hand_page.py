"""The commands, files and units for machines set up by hand, as the page on them gives them."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from distributed import Client
from distributed.cli import dask_scheduler, dask_spec, dask_worker

from daskcnn import cli, run
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.run.admission import WRITE
from daskcnn.job.resolve import parse_value
from daskcnn.job.tables import Cluster, Workers
from tests.command_lines import context_of
from tests.deploy.manifests import DEPLOY

PAGES = ("README.md", "hpc.md")
COMMANDS = {
    ("dask", "scheduler"): dask_scheduler.main,
    ("dask", "worker"): dask_worker.main,
    ("dask", "spec"): dask_spec.main,
    ("python", "-m", "daskcnn.run"): run.main,
    ("daskcnn",): cli.main,
}
UNITS = sorted((DEPLOY / "systemd").glob("*.service"), key=lambda path: path.name)


def parsed(words: list[str]) -> click.Context | None:
    """What click makes of a command line, options of subcommands and all; None for a command of others."""
    words = [Path(words[0]).name, *words[1:]]
    for start, command in COMMANDS.items():
        if tuple(words[: len(start)]) == start:
            return context_of(command, words[len(start) :])
    return None


def lines_of(page: str) -> Iterator[str]:
    """Every command line in a page's blocks."""
    for language, block in re.findall(r"(?ms)^```(\w*)$(.*?)^```$", (DEPLOY / page).read_text(encoding="utf-8")):
        if not language:
            yield from (line for line in block.splitlines() if line.strip() and not line.startswith("#"))


def ours(line: str) -> list[str]:
    """The command in a line, without the variables set before it."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_parses(page: str) -> None:
    found = [context for line in lines_of(page) if (context := parsed(ours(line)))]
    assert len(found) >= {"README.md": 7, "hpc.md": 1}[page]


def test_a_command_that_does_not_exist_is_seen() -> None:
    with pytest.raises(click.NoSuchOption):
        parsed(shlex.split("dask worker tcp://host:8786 --nprocs 4"))


def test_the_page_links_to_what_is_there() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", (DEPLOY / page).read_text(encoding="utf-8")):
            assert (DEPLOY / link).exists(), f"{page}: {link}"


def test_the_pages_certificates_are_good(tmp_path: Path) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    for line in lines_of("README.md"):
        if line.startswith("openssl"):
            subprocess.run(shlex.split(line), cwd=tmp_path, check=True, capture_output=True, timeout=60)
    command = ["openssl", "verify", "-CAfile", "ca.pem", "-purpose", "sslclient", "node.pem"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# --- systemd ---


def unit_options(path: Path) -> dict[str, str]:
    """[Service] of a unit; the last of options given twice, but `Environment`, which none of these tests reads."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path, encoding="utf-8")
    return dict(unit["Service"])


def environment_file() -> dict[str, str]:
    lines = (DEPLOY / "systemd" / "daskcnn.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def started_by(path: Path) -> click.Context:
    """What a unit's command comes to, its variables and specifiers filled in."""
    text = re.sub(r"\$\{(\w+)\}", lambda m: environment_file()[m[1]], unit_options(path)["ExecStart"])
    context = parsed(shlex.split(text.replace("%i", "first").replace("%H", "desk")))
    assert context is not None, text
    return context


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_parses(path: Path) -> None:
    params = started_by(path).params
    if "resources" in params:
        kind = re.search(r"cpu|gpu|parameter", path.name)
        assert kind is not None
        assert params["resources"] == {"cpu": "CPU=1", "gpu": "GPU=1", "parameter": "PS=1"}[kind.group()]
        assert params["memory_limit"]
        assert params["nthreads"] == (4 if kind.group() == "cpu" else 1)


def test_the_training_unit_is_not_started_again_in_vain() -> None:
    (path,) = [path for path in UNITS if "train" in path.name]
    options, flags = unit_options(path), started_by(path).params
    assert options["Restart"] == "on-failure"
    assert options["RestartPreventExitStatus"].split() == ["2", "4", "6"]
    assert (flags["resume"], flags["name"], parse_value(flags["wait"])) == ("auto", "first", 600)


@pytest.mark.parametrize("path", [path for path in UNITS if "scheduler" not in path.name], ids=lambda path: path.name)
def test_workers_and_drivers_may_write_where_all_machines_see(path: Path) -> None:
    """Workers prepare a data set beside its output; all of them are looked at, and all have to be able to write."""
    shared = re.search(r"data prepare \S+ --out (/\w+)/", (DEPLOY / "README.md").read_text(encoding="utf-8"))
    assert shared is not None
    options = unit_options(path)
    assert options["ProtectSystem"] == "strict"
    assert options["ReadWritePaths"].split() == [f"-{shared[1]}"], "and a machine without it starts"
    assert "ReadWritePaths" in WRITE, "the remedy says so"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text(encoding="utf-8").replace("/opt/daskcnn/bin", str(Path(sys.executable).parent))
        name = path.name.replace("@.", "@first.")
        (tmp_path / name).write_text(text.replace("User=daskcnn", "User=root"), encoding="utf-8")
    command = ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- dask spec ---


def specs(name: str) -> list[dict[str, Any]]:
    """The workers that a file describes."""
    found = yaml.safe_load((DEPLOY / "spec" / name).read_text(encoding="utf-8"))
    return [found] if "cls" in found else list(found.values())


def test_files_for_one_kind_are_the_parts_of_a_machines() -> None:
    for name, kind in {"cpu.yaml": "CPU", "gpu.yaml": "GPU", "ps.yaml": "PS"}.items():
        (one,) = specs(name)
        assert one["opts"]["resources"] == {kind: 1}
    assert [list(one["opts"]["resources"]) for one in specs("machine.yaml")] == [["CPU"], ["GPU"], ["GPU"]]
    devices = [one["opts"].get("env", {}).get("CUDA_VISIBLE_DEVICES") for one in specs("machine.yaml")]
    assert devices == [None, "0", "1"]


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, *words: str, folder: Path) -> None:
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "dask", *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


@pytest.mark.cluster
@pytest.mark.slow
def test_spec_files_start_the_workers_they_describe(processes: ExitStack, tmp_path: Path) -> None:
    where = str(tmp_path / "scheduler.json")
    start(processes, "scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", where, folder=tmp_path)
    with connect(Cluster(scheduler_file=where, wait=60)) as client:
        for name in ("machine.yaml", "ps.yaml"):
            file = str(DEPLOY / "spec" / name)
            start(processes, "spec", "--spec-file", file, client.scheduler.address, folder=tmp_path)
        members = wait_for_members(client, Workers(cpu=1, gpu=2), 60)
        client.wait_for_workers(4, timeout=60)
        members = wait_for_members(client, Workers(cpu=1, gpu=2), 60)
        assert [(m.kind, m.threads) for m in members.workers] == [("cpu", 2), ("gpu", 1), ("gpu", 1)]
        assert members.server_alone
        assert visible_devices(client, [m.address for m in members.workers]) == ["", "0", "1"]


def visible_devices(client: Client, workers: list[str]) -> list[str]:
    def read() -> str:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    read.__module__ = "__main__"  # the workers do not have this file
    found = client.run(read, workers=workers)
    return sorted(found[address] for address in workers)
