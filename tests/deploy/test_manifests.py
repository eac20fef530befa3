"""The manifests are what Kubernetes takes, and fit each other, the image and the programs that they start."""

from __future__ import annotations

import functools
import json
import os
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import click
import dask
import distributed
import kubernetes_validate
import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker

import daskcnn
from daskcnn import cli, errors, run
from daskcnn.cli.flags import FLAGS, override_by_flags
from daskcnn.job.resolve import resolve
from tests.command_lines import context_of
from tests.deploy.manifests import (
    DEPLOY,
    KUSTOMIZATIONS,
    Manifest,
    Pod,
    build,
    command_line,
    environment,
    expanded,
    of_kind,
    pods,
)

KUBERNETES = ("1.31", kubernetes_validate.latest_version())
"""The oldest that knows every field we use, and the newest that the validator knows."""
OTHERS = ("cert-manager.io/", "kubernetes.dask.org/")
IMAGE_USER = 10001
IMAGE_HOME = "/tmp"


@pytest.fixture(params=KUSTOMIZATIONS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """The manifests of each kustomization."""
    return build(request.param)


def containers(manifests: list[Manifest]) -> Iterator[tuple[Pod, dict[str, Any]]]:
    return ((pod, container) for pod in pods(manifests) for container in pod.containers)


def started(container: dict[str, Any], manifests: list[Manifest]) -> tuple[list[str], dict[str, str]]:
    """The words and variables that a container starts with."""
    variables = environment(container, manifests, "10.1.2.3", "pod-1")
    injected = {"DASK_WORKER_NAME": "worker-1"} if of_kind(manifests, "DaskJob") else {}  # by the operator
    return expanded(command_line(container), variables | injected), variables


def parsed(words: list[str]) -> click.Context:
    """What a command's program makes of its arguments, without running it; of a loop, the command it tries again.

    Raises click.UsageError.
    """
    if words[:2] == ["sh", "-c"]:
        command, _, rest = words[2].partition(";")
        assert command.startswith("until ")
        assert rest == " do sleep 10; done"
        return parsed(shlex.split(command.removeprefix("until ")))
    programs: dict[tuple[str, ...], click.Command] = {
        ("dask", "scheduler"): dask_scheduler.main,
        ("dask", "worker"): dask_worker.main,
        ("python", "-m", "daskcnn.run"): run.main,
        ("daskcnn",): cli.main,
    }
    program = next(p for p in programs if tuple(words[: len(p)]) == p)
    return context_of(programs[program], words[len(program) :])


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_core_kinds(manifests: list[Manifest], version: str) -> None:
    core = [m for m in manifests if not m["apiVersion"].startswith(OTHERS)]
    for manifest in core:
        assert_taken(json.dumps(manifest, sort_keys=True), version)
    assert len(core) >= 15


@functools.cache
def assert_taken(manifest: str, version: str) -> None:
    """Overlays share most of their manifests, and the validator reads all of its definitions for each."""
    kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def test_everything_lies_in_one_namespace_that_is_restricted(manifests: list[Manifest]) -> None:
    (namespace,) = of_kind(manifests, "Namespace").values()
    levels = {k: v for k, v in namespace["metadata"]["labels"].items() if k.startswith("pod-security")}
    assert levels == {f"pod-security.kubernetes.io/{m}": "restricted" for m in ("enforce", "warn", "audit")}
    assert {m["metadata"].get("namespace") for m in manifests if m is not namespace} == {namespace["metadata"]["name"]}


def test_every_command_parses(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        words, _ = started(container, manifests)
        context = parsed(words)
        # dask takes what it does not know for arguments of a preload script
        assert not context.params.get("preload_argv"), (pod.name, words)
        assert not context.args, (pod.name, words)


def test_the_job_resolves(manifests: list[Manifest]) -> None:
    """Flags and job file together are a job without contradictions, and name what is mounted."""
    (container,) = (c for pod, c in containers(manifests) if c["name"] == "train")
    words, _ = started(container, manifests)
    params = dict(parsed(words).params)
    file = PurePosixPath(params.pop("job_file"))
    settings, resume = params.pop("settings"), params.pop("resume")
    raw = tomllib.loads(of_kind(manifests, "ConfigMap")["job"]["data"][file.name])
    override_by_flags(raw, {k: v for k, v in params.items() if k.replace("_", "-") in FLAGS}, settings)
    job = resolve(raw)
    assert resume == "auto"
    assert job.run.name
    assert job.cluster.wait == 600
    assert job.cluster.workers.given == _workers_there(manifests)


def _workers_there(manifests: list[Manifest]) -> dict[str, int]:
    """How many workers of each kind the manifests start, without those set apart for the server."""
    found: dict[str, int] = {}
    for manifest in manifests:
        for pod in pods([manifest]):
            if pod.labels.get("daskcnn/role") != "worker":
                continue
            words, _ = started(pod.containers[0], manifests)
            kind = parsed(words).params["resources"].removesuffix("=1").lower()
            found[kind] = found.get(kind, 0) + _replicas(manifest)
    assert found.pop("ps") == 1
    return found


def _replicas(manifest: Manifest) -> int:
    spec = manifest["spec"]
    if manifest["kind"] == "DaskJob":
        spec = spec["cluster"]["spec"]
    return int(spec.get("worker", spec)["replicas"])


def test_workers_listen_where_their_ports_say(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        if pod.labels.get("daskcnn/role") != "worker":
            continue
        params = parsed(started(container, manifests)[0]).params
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        assert (params["worker_port"], params["nanny_port"]) == (str(ports["comm"]), str(ports["nanny"]))
        assert params["dashboard_address"] == f"10.1.2.3:{ports['http']}"
        assert params["host"] == "10.1.2.3"
        assert params["scheduler"] == f"{_scheduler_name(manifests)}:8786"
        assert float(params["memory_limit"]) < 1, "the nanny needs memory too"
        assert params["nthreads"] <= int(container["resources"]["limits"]["cpu"])


def _scheduler_name(manifests: list[Manifest]) -> str:
    """The Service's; the operator makes one named after the cluster."""
    jobs = of_kind(manifests, "DaskJob")
    return f"{next(iter(jobs))}-scheduler" if jobs else next(iter(of_kind(manifests, "Service")))


def test_services_reach_the_scheduler(manifests: list[Manifest]) -> None:
    (scheduler,) = (pod for pod in pods(manifests) if pod.component == "scheduler")
    (container,) = scheduler.containers
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    params = parsed(started(container, manifests)[0]).params
    at, *forwarded = params["dashboard_address"].split(",")
    assert (params["port"], at) == (str(ports["comm"]), f"10.1.2.3:{ports['http']}")
    assert forwarded in ([], [f"127.0.0.1:{ports['http']}"])
    services = [m["spec"] for m in of_kind(manifests, "Service").values()]
    by_operator = [m["spec"]["cluster"]["spec"]["scheduler"]["service"] for m in of_kind(manifests, "DaskJob").values()]
    given = {"dask.org/cluster-name": "daskcnn", "dask.org/component": "scheduler"} if by_operator else {}
    (service,) = services + by_operator
    assert service["selector"].items() <= (scheduler.labels | given).items()
    assert {p["port"] for p in service["ports"]} >= {8786}
    assert all(ports[p["targetPort"]] == p["port"] for p in service["ports"])


def test_clients_look_for_the_scheduler_that_is_there(manifests: list[Manifest]) -> None:
    (container,) = (c for _, c in containers(manifests) if c["name"] == "train")
    assert parsed(started(container, manifests)[0]).params["scheduler"] == f"{_scheduler_name(manifests)}:8786"


def test_selectors_choose_their_own_pods(manifests: list[Manifest]) -> None:
    everything = pods(manifests)
    for deployment in of_kind(manifests, "Deployment").values():
        wanted = deployment["spec"]["selector"]["matchLabels"]
        chosen = [pod.name for pod in everything if wanted.items() <= pod.labels.items()]
        assert chosen == [f"Deployment/{deployment['metadata']['name']}"]
    (budget,) = of_kind(manifests, "PodDisruptionBudget").values()
    wanted = budget["spec"]["selector"]["matchLabels"]
    assert {p.component for p in everything if wanted.items() <= p.labels.items()} == {"scheduler"}
    assert budget["spec"]["maxUnavailable"] == 0


def test_probes_ask_ports_that_are_open(manifests: list[Manifest]) -> None:
    """Whatever runs on is probed; what ends by itself is not."""
    for pod, container in containers(manifests):
        kinds = [f"{kind}Probe" for kind in ("startup", "liveness", "readiness")]
        probes = [container[kind] for kind in kinds if kind in container]
        assert len(probes) == (3 if command_line(container)[0] == "dask" else 0), pod.name
        names = {port["name"] for port in container.get("ports", ())}
        assert all(probe["httpGet"]["port"] in names for probe in probes)
        assert all(probe["httpGet"]["path"] == "/health" for probe in probes)


def test_what_is_mounted_exists(manifests: list[Manifest]) -> None:
    maps, claims = of_kind(manifests, "ConfigMap"), of_kind(manifests, "PersistentVolumeClaim")
    secrets = {m["spec"]["secretName"] for m in of_kind(manifests, "Certificate").values()}
    for pod in pods(manifests):
        names = [volume["name"] for volume in pod.spec["volumes"]]
        assert len(names) == len(set(names))
        for volume in pod.spec["volumes"]:
            assert volume.get("configMap", {}).get("name", "dask") in maps
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "data") in claims
            secret = volume.get("secret", {"optional": True})
            assert secret.get("optional") or secret["secretName"] in secrets
            assert len(volume) == 2, "no other kind of volume"
        mounted = {m["name"] for c in pod.containers for m in c["volumeMounts"]}
        assert mounted == set(names), pod.name
    assert all(s["configMapRef"]["name"] in maps for _, c in containers(manifests) for s in c.get("envFrom", ()))


def _writable(pod: Pod, container: dict[str, Any], path: str) -> bool:
    """Whether the path lies in a volume that may be written, and that belongs to the pod's group."""
    return pod.spec["securityContext"]["fsGroup"] == IMAGE_USER and any(
        PurePosixPath(path).is_relative_to(mount["mountPath"])
        and not mount.get("readOnly")
        and ("emptyDir" in volume or not volume.get("persistentVolumeClaim", {"readOnly": True}).get("readOnly"))
        for mount in container["volumeMounts"]
        for volume in pod.spec["volumes"]
        if volume["name"] == mount["name"]
    )


def _written(params: dict[str, Any], variables: dict[str, str]) -> list[str]:
    """Where a command writes: temporary files and Dask's own settings at HOME, caches, and what its options say."""
    caches = [variables[name] for name in ("DASKCNN_CACHE_DIR", "CUPY_CACHE_DIR", "TMPDIR") if name in variables]
    options = [params[name] for name in ("local_directory", "run_dir", "out") if params.get(name)]
    return [IMAGE_HOME, *caches, *options]


def test_everything_that_is_written_can_be(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        words, variables = started(container, manifests)
        params = parsed(words).params
        for path in _written(params, variables):
            assert _writable(pod, container, path), (pod.name, path)
        if words[:2] == ["dask", "worker"]:
            assert params["local_directory"], "else it would write into the working directory"
            assert "DASKCNN_CACHE_DIR" in variables
            assert "GPU" not in params["resources"] or "CUPY_CACHE_DIR" in variables


def test_everything_that_is_read_is_mounted(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        words, variables = started(container, manifests)
        params = parsed(words).params
        read = [variables.get("DASK_CONFIG"), params.get("job_file"), params.get("data"), params.get("path")]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in filter(None, read):
            assert any(PurePosixPath(path).is_relative_to(mount) for mount in mounts), (pod.name, path)
        assert words[0] != "dask" or variables["DASK_CONFIG"] == "/config/dask"


def test_workers_and_job_read_what_is_prepared(manifests: list[Manifest]) -> None:
    contexts = {c["name"]: parsed(started(c, manifests)[0]) for _, c in containers(manifests)}
    found = {name: context.params for name, context in contexts.items()}
    assert found["prepare"]["out"] == found["train"]["data"] == found["wait-for-data"]["path"]
    assert contexts["prepare"].command.name == found["train"]["dataset"]
    for pod in pods(manifests):
        if pod.labels.get("daskcnn/role") == "worker":
            (mount,) = (m for m in pod.containers[0]["volumeMounts"] if m["name"] == "data")
            assert PurePosixPath(found["train"]["data"]).is_relative_to(mount["mountPath"])
            assert mount["readOnly"]


def test_pods_are_restricted(manifests: list[Manifest]) -> None:
    """Pod Security's level `restricted`, and a root file system that nobody writes."""
    for pod in pods(manifests):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"]) == (IMAGE_USER, IMAGE_USER)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.spec.keys()
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container.get("ports", ()))


def test_nothing_has_or_needs_a_right(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    accounts = of_kind(manifests, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    for pod in pods(manifests):
        assert pod.spec["serviceAccountName"] in accounts
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False, "a Service's variables must not be taken for Dask's settings"


def test_requests_and_limits_are_given(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        resources = container["resources"]
        assert resources["requests"].keys() >= {"cpu", "memory"} <= resources["limits"].keys(), pod.name
        assert resources["requests"]["memory"] == resources["limits"]["memory"], "what is promised is there"
        assert all("sizeLimit" in v["emptyDir"] for v in pod.spec["volumes"] if "emptyDir" in v)
        assert pod.spec["terminationGracePeriodSeconds"] >= (120 if pod.component == "train" else 30)


def test_images_are_of_this_version_and_kind(manifests: list[Manifest]) -> None:
    for pod, container in containers(manifests):
        device = "gpu" if pod.component == "gpu-worker" else "cpu"
        assert container["image"] == f"daskcnn-{device}:{daskcnn.__version__}", pod.name
        assert container["resources"]["limits"].get("nvidia.com/gpu") == ("1" if device == "gpu" else None)
    for pod in pods(manifests):
        tolerated = [t["key"] for t in pod.spec.get("tolerations", ())]
        assert tolerated == (["nvidia.com/gpu"] if pod.component == "gpu-worker" else [])


def test_dask_knows_every_setting(manifests: list[Manifest]) -> None:
    defaults = yaml.safe_load((Path(distributed.__file__).parent / "distributed.yaml").read_text())
    defaults |= yaml.safe_load((Path(dask.__file__).parent / "dask.yaml").read_text())
    for name, text in of_kind(manifests, "ConfigMap")["dask"]["data"].items():
        assert name.endswith(".yaml"), "Dask reads no other files of the folder"
        unknown = list(_unknown(yaml.safe_load(text), defaults, ""))
        assert unknown == [], name


def _unknown(settings: dict[str, Any], defaults: dict[str, Any], above: str) -> Iterator[str]:
    for key, value in settings.items():
        if key not in defaults:
            yield f"{above}{key}"
        elif isinstance(value, dict):
            yield from _unknown(value, defaults[key], f"{above}{key}.")


def test_exit_codes_that_would_come_again_end_the_job() -> None:
    job = of_kind(build("k8s/base"), "Job")["train"]["spec"]
    drained, refused = job["podFailurePolicy"]["rules"]
    assert drained["action"] == "Ignore"
    assert drained["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (refused["action"], refused["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert refused["onExitCodes"]["containerName"] == "train"
    ends = {errors.JobError.exit_code, errors.DataError.exit_code, errors.Diverged.exit_code, errors.NotKept.exit_code}
    assert set(refused["onExitCodes"]["values"]) == ends
    assert not ends & {errors.ClusterError.exit_code, errors.Lost.exit_code, 1, 130, 143}
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimit"] > 0
    assert job["podReplacementPolicy"] == "Failed"


def test_the_operators_runner_is_not_started_again() -> None:
    """It has no policy by exit code: a wrong job would be tried for ever."""
    (runner,) = (pod for pod in pods(build("operator")) if pod.component == "train")
    assert runner.spec["restartPolicy"] == "Never"


def test_the_operator_runs_the_same_pods() -> None:
    """But for the Service's name, which is the operator's, and the worker's, which the operator must know."""
    plain = {pod.component: pod.spec for pod in pods(build("k8s/overlays/gpu"))}
    for pod in pods(build("operator")):
        assert _as_plain(pod.spec) == _as_plain(plain[pod.component]), pod.component


def _as_plain(spec: dict[str, Any]) -> dict[str, Any]:
    text = yaml.safe_dump(spec).replace("daskcnn-scheduler:8786", "scheduler:8786")
    same: dict[str, Any] = yaml.safe_load(text.replace("$(DASK_WORKER_NAME)", "$(POD_NAME)"))
    same.pop("topologySpreadConstraints", None)
    for container in same["containers"]:
        container["env"] = [v for v in container.get("env", ()) if v["name"] != "POD_NAME"]
    return same


def test_the_readme_s_own_kustomization_does_what_it_says(tmp_path: Path) -> None:
    """Its patches come after the components', whose settings they change."""
    readme = (DEPLOY / "k8s/README.md").read_text()
    text = readme.split("```yaml\n")[1].split("```")[0]
    assert "daskcnn/deploy/" in text
    own = text.replace("daskcnn/deploy/", f"{os.path.relpath(DEPLOY, tmp_path.resolve())}/")
    (tmp_path / "kustomization.yaml").write_text(own)
    manifests = build(tmp_path)
    settings = of_kind(manifests, "ConfigMap")["run"]["data"]
    assert settings["WORKERS"] == "cpu=8,gpu=1"
    assert _workers_there(manifests) == {"cpu": 8, "gpu": 1}
    assert all(c["image"].startswith("example/daskcnn-") for _, c in containers(manifests))
    assert {s["secretName"] for p in pods(manifests) for v in p.spec["volumes"] if (s := v.get("secret"))} == {
        "scheduler-tls",
        "worker-tls",
        "client-tls",
    }


@pytest.mark.parametrize("file", ["claims.yaml", "serve.yaml"])
def test_what_is_applied_beside_the_base_is_like_it(file: str) -> None:
    own = list(yaml.safe_load_all((DEPLOY / "k8s" / file).read_text()))
    for version in KUBERNETES:
        for each in own:
            kubernetes_validate.validate(each, version, strict=True)
    with_base = [*build("k8s/base"), *own]
    for law in (
        test_everything_lies_in_one_namespace_that_is_restricted,
        test_what_is_mounted_exists,
        test_pods_are_restricted,
        test_nothing_has_or_needs_a_right,
        test_requests_and_limits_are_given,
        test_images_are_of_this_version_and_kind,
        test_selectors_choose_their_own_pods,
    ):
        law(with_base)


@pytest.mark.parametrize("file", ["claims.yaml", "serve.yaml"])
def test_what_is_applied_beside_the_base_speaks_as_the_job_does_and_seeks_its_node(file: str) -> None:
    """With `tls` too, whose settings are in the same map, and whose certificate is mounted."""
    job = next(p for p in pods(build("k8s/overlays/tls")) if p.name == "Job/train")
    own = next(iter(pods(list(yaml.safe_load_all((DEPLOY / "k8s" / file).read_text())))))

    def volumes(pod: Pod) -> dict[str, Any]:
        found = {v["name"]: v for v in pod.spec["volumes"]}
        return {
            name: {**found[name], "secret": found[name].get("secret", {}).get("secretName")}
            for name in ("dask", "certs")
        }

    assert volumes(own) == volumes(job)
    for pod in (own, job):
        (container,) = pod.spec["containers"]
        assert {"name": "DASK_CONFIG", "value": "/config/dask"} in container["env"]
        where = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert (where["dask"], where["certs"]) == ("/config/dask", "/certs")
        assert "tcp://" not in " ".join(container["args"])
    (near,) = own.spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = near["podAffinityTerm"]
    assert (term["topologyKey"], term["labelSelector"]["matchLabels"].items() <= job.labels.items()) == (
        "kubernetes.io/hostname",
        True,
    )


def test_kustomizations_are_all_tested() -> None:
    found = {p.parent.relative_to(DEPLOY).as_posix() for p in DEPLOY.rglob("kustomization.yaml")}
    assert {f for f in found if "components" not in f} == set(KUSTOMIZATIONS)
