"""What `deploy/` holds, as kustomize puts it together, and what a node would start of it."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUSTOMIZATIONS = (
    *("k8s/base", "k8s/overlays/gpu", "k8s/overlays/tls", "k8s/overlays/kind", "k8s/overlays/monitoring"),
    "operator",
)
Manifest = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where it is there: the other takes seconds for what the operator's package ships."""


def kustomize() -> list[str]:
    """The command that builds a kustomization. Skips the test where there is none."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            return command
    pytest.skip("neither kustomize nor kubectl is installed")


@functools.cache
def _built(folder: Path) -> str:
    done = subprocess.run([*kustomize(), str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.dumps([manifest for manifest in yaml.load_all(done.stdout, LOADER) if manifest])


def build(kustomization: str | Path) -> list[Manifest]:
    """The manifests of `deploy/<kustomization>`, or of a folder anywhere. They are the caller's, to change."""
    manifests: list[Manifest] = json.loads(_built(DEPLOY / kustomization))
    return manifests


@dataclass(frozen=True)
class Pod:
    """A pod that a manifest makes. `name` is kind/name of the manifest, and which pod where it makes several."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[dict[str, Any]]:
        """Init containers first, as they run."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def pods(manifests: list[Manifest]) -> list[Pod]:
    """Every pod, be it of a Deployment, a Job or the operator's kinds."""
    return [pod for manifest in manifests for pod in _pods_of(manifest)]


def _pods_of(manifest: Manifest) -> Iterator[Pod]:
    name = f"{manifest['kind']}/{manifest['metadata']['name']}"
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Pod":
        yield Pod(name, manifest["metadata"]["labels"], spec)
    elif manifest["kind"] in ("Deployment", "Job"):
        yield _pod(name, spec["template"])
    elif manifest["kind"] == "DaskJob":
        cluster = spec["cluster"]["spec"]
        yield _pod(f"{name}/job", spec["job"])
        yield from (_pod(f"{name}/{part}", cluster[part]) for part in ("scheduler", "worker"))
    elif manifest["kind"] == "DaskWorkerGroup":
        yield _pod(f"{name}/worker", spec["worker"])


def _pod(name: str, template: Mapping[str, Any]) -> Pod:
    return Pod(name, template["metadata"]["labels"], template["spec"])


def command_line(container: Mapping[str, Any]) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    """Manifests of these kinds by name."""
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] in kinds}


def environment(container: Mapping[str, Any], manifests: list[Manifest], pod_ip: str, pod_name: str) -> dict[str, str]:
    """The variables a container starts with, those of the downward API and of ConfigMaps filled in."""
    maps = of_kind(manifests, "ConfigMap")
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]["data"]
    for variable in container.get("env", ()):
        found[variable["name"]] = _value(variable, container, {"status.podIP": pod_ip, "metadata.name": pod_name})
    return found


def _value(variable: Mapping[str, Any], container: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return fields[source["fieldRef"]["fieldPath"]]
    assert source["resourceFieldRef"]["resource"] == "limits.cpu", variable
    return str(container["resources"]["limits"]["cpu"])


def expanded(words: list[str], variables: Mapping[str, str]) -> list[str]:
    """`$(NAME)` replaced as a node does it. Raises KeyError for what no variable is called."""
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]
