"""The manifests for Kubernetes played on loopback: data, cluster, job; the job ended half-way, and its successor."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import KUSTOMIZATIONS, Manifest, build, of_kind
from tests.deploy.replay_authority import Authority
from tests.deploy.replay_manifests import merged
from tests.deploy.replay_pods import Pod, Stage


@pytest.mark.parametrize("folder", [name for name in KUSTOMIZATIONS if name.startswith("k8s")])
def test_what_is_played_is_what_kustomize_builds(folder: str) -> None:
    def essence(manifests: list[Manifest]) -> dict[tuple[str, str], Any]:
        return {(m["kind"], m["metadata"]["name"]): _without_labels(m.get("data") or m.get("spec")) for m in manifests}

    assert essence(merged(folder)) == essence(build(folder))


def _without_labels(value: Any) -> Any:
    if isinstance(value, dict):
        drop = ("labels", "matchLabels", "image")  # kustomize adds labels and tags
        return {key: _without_labels(v) for key, v in value.items() if key not in drop}
    return [_without_labels(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """The overlay for one machine: everything of the base, with a small data set and little memory."""
    return Stage(with_few_samples(merged("k8s/overlays/kind")), tmp_path)


def with_few_samples(manifests: list[Manifest]) -> list[Manifest]:
    """Fewer than the overlay's minute of training: its job file, as a user would edit it."""
    of_kind(manifests, "ConfigMap")["job"]["data"]["job.toml"] += "\n[data]\nlimit = 2500\nvalidation = 500\n"
    return manifests


@pytest.fixture
def encrypted(tmp_path: Path) -> Stage:
    """Likewise with the component that adds TLS."""
    return with_secrets(with_few_samples(merged("k8s/overlays/kind", "k8s/components/tls")), tmp_path)


def with_secrets(manifests: list[Manifest], root: Path) -> Stage:
    """A stage of them, with a secret of each certificate, as cert-manager would make it."""
    authority, secrets = Authority(), {}
    for certificate in of_kind(manifests, "Certificate").values():
        if not (spec := certificate["spec"]).get("isCA"):
            secrets[spec["secretName"]] = root / "secrets" / spec["secretName"]
            authority.write(secrets[spec["secretName"]], spec)
    return Stage(manifests, root, secrets)


@pytest.fixture
def cluster() -> Iterator[ExitStack]:
    with ExitStack() as pods:
        yield pods


def start(stage: Stage, pods: ExitStack) -> list[Pod]:
    """Every Deployment's pods, those that the others reach by their Service first; then the data set."""
    services = of_kind(stage.manifests, "Service")
    deployments = of_kind(stage.manifests, "Deployment")

    def launch(name: str) -> list[Pod]:
        count = deployments[name]["spec"]["replicas"]
        return [pods.enter_context(stage.pod("Deployment", name)).launch() for _ in range(count)]

    launched = [pod.started() for name in deployments if name in services for pod in launch(name)]
    launched += [pod for name in deployments if name not in services for pod in launch(name)]
    with stage.pod("Job", "prepare-data") as pod:
        assert pod.run().wait(120) == 0, pod.said()
    return [pod.started() for pod in launched]


def run_directory(stage: Stage) -> Path:
    return stage.root / "claims" / "runs" / stage.config("run")["RUN"]


def events(stage: Stage, kind: str) -> list[dict[str, Any]]:
    log = run_directory(stage) / "events.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def wait_for_checkpoints(stage: Stage, count: int, pod: Pod, within: float = 200) -> None:
    deadline = time.monotonic() + within
    while len(events(stage, "checkpoint")) < count:
        assert pod.process is not None
        assert pod.process.poll() is None, pod.said()
        assert time.monotonic() < deadline, pod.said()
        time.sleep(0.05)


def ended_early(stage: Stage, pod: Pod, how: str) -> None:
    """The train pod ends after its first checkpoint: killed with its node, or asked to by the cluster."""
    wait_for_checkpoints(stage, 1, pod.run())
    if how == "killed":
        pod.kill()
        return
    pod.terminate()
    assert pod.wait(pod.spec["terminationGracePeriodSeconds"] / 4) == 143, pod.said()
    assert "Traceback" not in pod.said()


def resumed(stage: Stage, pod: Pod) -> dict[str, Any]:
    """The next pod goes on where the last one's checkpoint was, and every sample is seen as often as asked."""
    before = events(stage, "checkpoint")[-1]
    assert pod.run().wait(120) == 0, pod.said()
    assert "Traceback" not in pod.said()
    (going_on,) = events(stage, "resume")
    assert going_on["step"] == before["step"] > 0
    summary: dict[str, Any] = json.loads((run_directory(stage) / "summary.json").read_text())
    assert summary["status"] == "done"
    job = json.loads((run_directory(stage) / "job.json").read_text())
    assert summary["epochs"] == job["train"]["epochs"]
    return summary


def left_alone(stage: Stage, pod: Pod) -> None:
    """A pod that comes after all is done does nothing, and says so by its exit code."""
    seen = len(events(stage, "start"))
    assert pod.run().wait(60) == 0, pod.said()
    assert "this run is done" in pod.said()
    assert len(events(stage, "start")) == seen


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(("network", "how"), [("stage", "killed"), ("encrypted", "terminated")])
def test_a_job_that_is_ended_half_way_resumes_to_completion(
    request: pytest.FixtureRequest, cluster: ExitStack, network: str, how: str
) -> None:
    stage: Stage = request.getfixturevalue(network)
    start(stage, cluster)
    with stage.pod("Job", "train") as pod:
        ended_early(stage, pod, how)
    with stage.pod("Job", "train") as pod:
        summary = resumed(stage, pod)
        scheme = "tls://" if network == "encrypted" else "tcp://"
        addresses = [w["address"] for e in events(stage, "calibration") for w in e["workers"]]
        assert addresses
        assert all(address.startswith(scheme) for address in addresses)
        assert len(summary["workers"]) == 2
    with stage.pod("Job", "train") as pod:
        left_alone(stage, pod)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def read(address: str) -> str:
    """What is there, by plain HTTP."""
    with urllib.request.urlopen(f"http://{address}", timeout=10) as answer:
        found: str = answer.read().decode()
        return found


def wait_to_read(address: str, text: str, pod: Pod) -> None:
    """Figures come with the driver's next message to this process."""
    while text not in (found := read(address)):
        assert pod.process is not None
        assert pod.process.poll() is None, found
        time.sleep(0.1)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("tls", [(), ("k8s/components/tls",)], ids=["plain", "tls"])
def test_the_live_page_and_figures_are_where_the_readme_says(
    tmp_path: Path, cluster: ExitStack, tls: tuple[str, ...]
) -> None:
    manifests = with_few_samples(merged("k8s/overlays/kind", *tls, "k8s/components/monitoring"))
    arguments = of_kind(manifests, "Deployment")["scheduler"]["spec"]["template"]["spec"]["containers"][0]["args"]
    forwarded = f"127.0.0.1:{free_port()}"  # where port-forward would come from; 8787 may be somebody else's here
    (at,) = [i for i, argument in enumerate(arguments) if "127.0.0.1:8787" in argument]
    arguments[at] = arguments[at].replace("127.0.0.1:8787", forwarded)
    stage = with_secrets(manifests, tmp_path)
    launched = start(stage, cluster)
    addresses = {pod.name.rpartition("-")[0]: pod.address for pod in launched}
    with stage.pod("Job", "train") as pod:
        wait_for_checkpoints(stage, 1, pod.run())
        assert "daskcnn" in read(f"{forwarded}/daskcnn")
        run = f'run="{stage.config("run")["RUN"]}"'
        wait_to_read(f"{addresses['scheduler']}:8787/metrics", f"daskcnn_run_epoch{{{run}", pod)
        wait_to_read(f"{addresses['cpu-worker']}:8788/metrics", run, pod)
        assert pod.wait(120) == 0, pod.said()
    report = ["daskcnn", "report", str(run_directory(stage)), "--html", str(tmp_path / "report.html")]
    assert subprocess.run([Path(sys.executable).parent / report[0], *report[1:]], check=False).returncode == 0
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
