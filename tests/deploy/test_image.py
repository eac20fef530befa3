"""The Dockerfile: what its images hold and may do, and that its steps can be played."""

from __future__ import annotations

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from random import randrange
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.deploy.manifests import DEPLOY

DOCKERFILE = DEPLOY / "Dockerfile"
TARGETS = ("cpu", "gpu")


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


replay_image = _module("replay_image")
healthcheck = _module("healthcheck")
STAGES = replay_image.read_stages(DOCKERFILE.read_text())


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_nobody_in_particular(target: str) -> None:
    assert STAGES[target].last("USER") == "10001:10001", "a number: Kubernetes does not look names up"
    assert STAGES[target].last("HEALTHCHECK") is not None
    assert STAGES[target].last("ENTRYPOINT") == '["dask"]'
    assert STAGES[target].last("CMD") == '["cnn", "doctor", "--run-dir", "/runs"]', "the working directory is read-only"


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_built_in_the_last_stage(target: str) -> None:
    """Packages come from another stage, into an environment without pip."""
    steps = STAGES[target].steps
    assert not any(re.search(r"\b(pip|venv|gcc|make|build-essential|-dev)\b", t) for w, t in steps if w == "RUN")
    assert ("COPY", f"--from=build-{target} /opt/daskcnn /opt/daskcnn") in steps
    made = " ".join(text for _, text in STAGES["build-cpu"].steps)
    assert re.search(r"COPY [^\n]*\bLICENSE\b", DOCKERFILE.read_text()), "the package carries it"
    assert "venv --without-pip /opt/daskcnn" in made


def test_both_images_are_alike_but_for_the_gpu() -> None:
    """The same system and Python: workers of either join one cluster."""
    cpu, gpu = (STAGES[target] for target in TARGETS)
    assert (cpu.base, gpu.base) == ("ubuntu:${UBUNTU}", "nvidia/cuda:${CUDA}-base-ubuntu${UBUNTU}")
    assert STAGES["build-gpu"].base == "build-cpu"
    changed = {step for step in gpu.steps if step not in cpu.steps}
    assert {word for word, _ in changed} == {"COPY", "ENV"}
    assert set(replay_image.environment_of(gpu).items()) - set(replay_image.environment_of(cpu).items()) == {
        ("CUPY_CACHE_DIR", "/cache/cupy")
    }


def test_no_data_gets_into_the_build() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
    for path in ("daskcnn/run.py", "pyproject.toml", "LICENSE", "deploy/constraints.txt"):
        assert replay_image.sent_to_build(path, ignored)
    for path in ("data/cifar10.zarr", "runs/one", ".git/config", "deploy/k8s/base/run.env", "tests/conftest.py"):
        assert not replay_image.sent_to_build(path, ignored)
    copied = [text for stage in STAGES.values() for word, text in stage.steps if word in ("COPY", "ADD")]
    assert not any(re.search(r"data|runs|zarr", text) for text in copied)


def test_constraints_hold_for_what_is_required() -> None:
    lines = [line for line in (DEPLOY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["dashboard"], *extras["gpu"], *extras["plot"]):
        needed = Requirement(text)
        assert needed.specifier.contains(pinned[needed.name]), text


def test_stages_are_played_in_the_order_of_a_build() -> None:
    for target, names in (("cpu", ["build-cpu", "cpu"]), ("gpu", ["build-cpu", "build-gpu", "gpu"])):
        assert [stage.name for stage in replay_image.needed(STAGES, target)] == names


def test_continued_lines_and_comments_are_read(tmp_path: Path) -> None:
    text = "# c\nARG A=1\nFROM x AS one\nRUN a \\\n # between\n && b\nENV P=/opt Q=2\n"
    (stage,) = replay_image.read_stages(text).values()
    assert stage.steps == [("RUN", "a && b"), ("ENV", "P=/opt Q=2")]
    assert replay_image.environment_of(stage) == {"P": "/opt", "Q": "2"}
    with pytest.raises(ValueError, match="give the stage a name"):
        replay_image.read_stages("FROM x\n")


def test_steps_are_played_under_a_folder(tmp_path: Path) -> None:
    text = "FROM x AS one\nWORKDIR /src\nCOPY pyproject.toml ./\nRUN install -d /data && cp pyproject.toml /data/copy\n"
    played = replay_image.Replay(tmp_path / "root")
    played.play(replay_image.read_stages(text)["one"])
    assert (tmp_path / "root/data/copy").read_text() == (DEPLOY.parent / "pyproject.toml").read_text()
    assert played.here("/opt/a:/usr/bin --x=/data '/cache' /database") == (
        f"{played.root}/opt/a:/usr/bin --x={played.root}/data '{played.root}/cache' /database"
    )


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("RUN false", subprocess.CalledProcessError),
        ("COPY data ./", ValueError),
        ("COPY --from=build /opt/x /opt/x", ValueError),
    ],
)
def test_a_step_that_cannot_be_played_ends_it(tmp_path: Path, step: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        replay_image.Replay(tmp_path / "root").play(replay_image.read_stages(f"FROM x AS one\n{step}\n")["one"])


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("dask scheduler", "http://127.0.0.1:8787/health"),
        ("dask scheduler --dashboard-address=10.0.0.1:80", "http://10.0.0.1:80/health"),
        ("dask worker scheduler:8786 --dashboard-address :8788", "http://127.0.0.1:8788/health"),
        ("dask cnn run --scheduler scheduler:8786", None),
        ("-m daskcnn.run", None),
    ],
)
def test_health_is_asked_where_it_is_served(command: str, url: str | None) -> None:
    assert healthcheck.health_url(command.split()) == url


def test_a_scheduler_that_does_not_answer_is_not_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cmdline"
    file.write_text("\0".join(["python", "dask", "scheduler", "--dashboard-address=127.0.0.1:1", ""]))
    assert healthcheck.main(file) == 1
    assert "refused" in capsys.readouterr().out
    file.write_text("\0".join(["python", "dask", "worker", "scheduler:8786", ""]))
    assert healthcheck.main(file) == 0, "it may be well"
    assert "--dashboard-address" in capsys.readouterr().out
    file.write_text("\0".join(["python", "dask", "cnn", "run", ""]))
    assert healthcheck.main(file) == 0


@pytest.mark.cluster
def test_a_scheduler_that_answers_is_healthy() -> None:
    """The very command line of a process, as the container's first one has it."""
    host = f"127.{randrange(1, 255)}.{randrange(255)}.{randrange(1, 255)}"  # no other process takes a port of this one
    with socket.socket() as free:
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    dask = shutil.which("dask", path=str(Path(sys.executable).parent))
    command = [sys.executable, str(dask), "scheduler", "--host=127.0.0.1", "--port=0", f"--dashboard-address={address}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as scheduler:
        try:
            deadline = time.monotonic() + 60
            while healthcheck.main(Path(f"/proc/{scheduler.pid}/cmdline")) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert healthcheck.main(Path(f"/proc/{scheduler.pid}/cmdline")) == 0
        finally:
            scheduler.terminate()
