"""The operator's kinds against the definitions that its own package ships."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.manifests import LOADER, build, of_kind

KINDS = ("DaskJob", "DaskWorkerGroup")


@functools.cache
def definition(kind: str) -> dict[str, Any]:
    """The package's schema of a kind, read without importing it. Skips where it is not installed."""
    try:
        files = importlib.metadata.files("dask-kubernetes") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dask-kubernetes is not installed; it ships the definitions")
    (path,) = (f for f in files if f.match(f"crds/{kind.lower()}.yaml"))
    resource = yaml.load(path.read_text(encoding="utf-8"), LOADER)
    assert (resource["spec"]["group"], resource["spec"]["names"]["kind"]) == ("kubernetes.dask.org", kind)
    (version,) = resource["spec"]["versions"]
    assert version["name"] == "v1"
    schema: dict[str, Any] = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"const": kind}, "metadata": {"type": "object"}}
    return schema


def strict(schema: Any) -> Any:
    """The same schema, which refuses fields that it does not name: a cluster would drop them silently."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_s_definitions_take_them(kind: str) -> None:
    schema = definition(kind)
    found = of_kind(build("operator"), kind)
    assert found
    for manifest in found.values():
        assert manifest["apiVersion"] == "kubernetes.dask.org/v1"
        jsonschema.validate(manifest, schema)


def test_a_misspelt_field_is_refused() -> None:
    schema = definition("DaskWorkerGroup")
    manifest = of_kind(build("operator"), "DaskWorkerGroup")["daskcnn-gpu-worker"]
    manifest["spec"]["worker"]["spec"]["containers"][0]["arg"] = []
    with pytest.raises(jsonschema.ValidationError, match="arg"):
        jsonschema.validate(manifest, schema)


def test_groups_belong_to_the_job_s_cluster() -> None:
    """The operator names the cluster after the job."""
    manifests = build("operator")
    (job,) = of_kind(manifests, "DaskJob")
    groups = of_kind(manifests, "DaskWorkerGroup")
    assert {group["spec"]["cluster"] for group in groups.values()} == {job}
    assert f"{job}-default" not in groups, "the name that the operator gives the job's own group"
