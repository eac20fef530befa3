"""The policies let through what the programs need, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.manifests import KUSTOMIZATIONS, Manifest, Pod, build, of_kind, pods

SCHEDULER, WORKERS = "scheduler", ("cpu-worker", "gpu-worker", "parameter-server")
NEEDED = {
    *((worker, SCHEDULER, 8786) for worker in WORKERS),
    *((SCHEDULER, worker, port) for worker in WORKERS for port in (8789, 8790)),  # Dask asks nannies to restart
    *((one, other, 8789) for one in WORKERS for other in WORKERS),
    ("train", SCHEDULER, 8786),
    *(("train", worker, 8789) for worker in WORKERS),
}
"""Who opens which port of whose."""


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_pods_reach_what_they_need_and_nothing_else(kustomization: str) -> None:
    manifests = build(kustomization)
    policies = [m["spec"] for m in of_kind(manifests, "NetworkPolicy").values()]
    everything = pods(manifests)
    open_to = {
        (source.component, target.component, port)
        for source in everything
        for target in everything
        for port in _ports(target).values()
        if _allowed(policies, source, target, port)
    }
    there = {pod.component for pod in everything}
    assert open_to == {(a, b, port) for a, b, port in NEEDED if {a, b} <= there}


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_strangers_reach_nothing_and_nothing_is_free_to_call(kustomization: str) -> None:
    """A pod that no policy chooses for a direction would be open in it."""
    manifests = build(kustomization)
    policies = [m["spec"] for m in of_kind(manifests, "NetworkPolicy").values()]
    stranger = Pod("Pod/stranger", {}, {})
    for pod in pods(manifests):
        for direction in ("Ingress", "Egress"):
            assert any(direction in p["policyTypes"] and _chosen(p["podSelector"], pod) for p in policies), pod.name
        assert not any(_side(policies, pod, "Ingress", stranger, pod, port) for port in _ports(pod).values())


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS)
def test_no_policy_chooses_nobody(kustomization: str) -> None:
    manifests = build(kustomization)
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        assert any(_chosen(policy["spec"]["podSelector"], pod) for pod in pods(manifests)), name


def test_only_the_preparation_leaves_the_cluster_and_only_by_https() -> None:
    """Not to private networks either, where a cloud answers with credentials."""
    manifests = build("k8s/base")
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        rules = policy["spec"].get("egress", [])
        blocks = [to["ipBlock"] for rule in rules for to in rule["to"] if "ipBlock" in to]
        assert bool(blocks) == (name == "prepare-data")
        if blocks:
            assert [port["port"] for rule in rules for port in rule["ports"]] == [443]
            assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(blocks[0]["except"])


def test_a_prometheus_beside_reads_figures_and_nothing_else() -> None:
    """Another namespace's pods come through by a rule that names both, namespace and pod."""
    manifests = build("k8s/overlays/monitoring")
    read = set()
    for policy in of_kind(manifests, "NetworkPolicy").values():
        rules = [r for r in policy["spec"].get("ingress", ()) if any("namespaceSelector" in e for e in r["from"])]
        for rule in rules:
            (peer,) = rule["from"]
            assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
            assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
            chosen = [pod for pod in pods(manifests) if _chosen(policy["spec"]["podSelector"], pod)]
            read |= {(pod.component, _ports(pod)[port["port"]]) for pod in chosen for port in rule["ports"]}
    assert read == {("scheduler", 8787), ("cpu-worker", 8788), ("parameter-server", 8788)}


def _ports(pod: Pod) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for c in pod.containers for p in c.get("ports", ())}


def _allowed(policies: list[Manifest], source: Pod, target: Pod, port: int) -> bool:
    return _side(policies, source, "Egress", target, target, port) and _side(
        policies, target, "Ingress", source, target, port
    )


def _side(policies: list[Manifest], pod: Pod, direction: str, peer: Pod, target: Pod, port: int) -> bool:
    """Whether a pod's own side lets it through: where no policy chooses the pod, everything."""
    field, end = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    chosen = [p for p in policies if direction in p["policyTypes"] and _chosen(p["podSelector"], pod)]
    rules = [rule for policy in chosen for rule in policy.get(field, ())]
    return not chosen or any(
        any("podSelector" in e and "namespaceSelector" not in e and _chosen(e["podSelector"], peer) for e in rule[end])
        and any(_ports(target).get(p["port"], p["port"]) == port for p in rule["ports"])
        for rule in rules
    )


def _chosen(selector: dict[str, Any], pod: Pod) -> bool:
    assert selector.keys() <= {"matchLabels"}, "this test knows no other"
    return selector.get("matchLabels", {}).items() <= pod.labels.items()
