"""Kustomizations merged as far as ours need it, where kustomize is not at hand: resources, components, config maps,
JSON patches. Namespaces, labels and image tags are left alone: a replay has no use for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import DEPLOY, Manifest


def merged(*folders: str) -> list[Manifest]:
    """The manifests of kustomizations under `deploy/`, each applied to what those before it came to."""
    manifests: list[Manifest] = []
    for folder in folders:
        _apply(manifests, (DEPLOY / folder).resolve())
    return manifests


def _apply(manifests: list[Manifest], folder: Path) -> None:
    own = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    for name in own.get("resources", []):
        path = (folder / name).resolve()
        if path.is_dir():
            _apply(manifests, path)
        else:
            manifests += [m for m in yaml.safe_load_all(path.read_text(encoding="utf-8")) if m]
    for generator in own.get("configMapGenerator", []):
        _config_map(manifests, generator["name"])["data"].update(_generated(folder, generator))
    for patch in own.get("patches", []):
        for manifest in _targets(manifests, **patch["target"]):
            _patch(manifest, yaml.safe_load((folder / patch["path"]).read_text(encoding="utf-8")))
    for name in own.get("components", []):
        _apply(manifests, (folder / name).resolve())


def _config_map(manifests: list[Manifest], name: str) -> Manifest:
    for found in _targets(manifests, "ConfigMap", re.escape(name)):
        return found
    manifests.append({"kind": "ConfigMap", "metadata": {"name": name}, "data": {}})
    return manifests[-1]


def _generated(folder: Path, generator: dict[str, Any]) -> dict[str, str]:
    found = {name: (folder / name).read_text(encoding="utf-8") for name in generator.get("files", [])}
    lines = [line for name in generator.get("envs", []) for line in (folder / name).read_text().splitlines()]
    pairs = [line for line in [*lines, *generator.get("literals", [])] if line.strip() and not line.startswith("#")]
    return found | {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _targets(manifests: list[Manifest], kind: str, name: str = ".*") -> Iterator[Manifest]:
    yield from (m for m in manifests if m["kind"] == kind and re.fullmatch(name, m["metadata"]["name"]))


def _patch(manifest: Manifest, operations: list[dict[str, Any]]) -> None:
    """RFC 6902, as far as ours go: replace, and add at a list's end."""
    for operation in operations:
        *way, last = operation["path"].strip("/").split("/")
        at: Any = manifest
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        value = deepcopy(operation["value"])
        if isinstance(at, list):
            assert (operation["op"], last) == ("add", "-"), operation
            at.append(value)
        else:
            assert operation["op"] == "add" or last in at, operation
            at[last] = value
