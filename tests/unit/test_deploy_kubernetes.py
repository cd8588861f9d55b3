"""The Kubernetes manifests are valid against the API's schemas, restrict their pods, and agree with the services' settings."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.lifecycle import STOP_TIMEOUT_S
from kvmesh.settings.declare import specs
from kvmesh.worker.settings import HostSettings
from services.frontend.settings import FrontendSettings
from services.planner.settings import PlannerSettings
from services.router.settings import RouterSettings

# jsonschema, which the package needs, may be missing if vLLM is not installed.
kubernetes_validate = pytest.importorskip("kubernetes_validate", exc_type=ImportError)

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (ROOT / "components").iterdir())
VERSIONS = ("1.30", "1.37")
"""The oldest release that the manifests support (preStop sleep), and the newest one whose schemas the package has."""
OTHER_SCHEMAS = {"ScaledObject"}
"""Kinds of other projects, whose schemas the package lacks."""
ROLES: dict[str, type] = {
    "frontend": FrontendSettings,
    "router": RouterSettings,
    "planner": PlannerSettings,
    "prefill": HostSettings,
    "decode": HostSettings,
}


def read(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.load_all(path.read_text(), yaml.CSafeLoader) if each]


def base() -> list[dict[str, Any]]:
    names = yaml.safe_load((ROOT / "base" / "kustomization.yaml").read_text())["resources"]
    assert set(names) == {path.name for path in (ROOT / "base").glob("*.yaml")} - {"kustomization.yaml"}
    return [document for name in names for document in read(ROOT / "base" / name)]


def find(documents: list[dict[str, Any]], kind: str, name: str = "") -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] == kind and name in ("", each["metadata"]["name"])]


def workloads(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for kind in ("Deployment", "StatefulSet", "DaemonSet"):
        yield from find(documents, kind)


def check_schemas(documents: list[dict[str, Any]], versions: tuple[str, ...] = VERSIONS) -> None:
    """Validates all documents in strict mode, which refuses unknown fields."""
    for document in documents:
        if document["kind"] in OTHER_SCHEMAS:
            continue
        for version in versions:
            kubernetes_validate.validate(document, version, strict=True)


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Returns the documents that Kustomize renders from a directory."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("no kubectl on PATH, which has Kustomize; the base and the patches are checked without it")
    made = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    return [each for each in yaml.load_all(made.stdout, yaml.CSafeLoader) if each]


def check_restricted(documents: list[dict[str, Any]]) -> None:
    """No pod runs as root, can write to its root file system, can gain privileges, or has a service account token.

    A policy denies all traffic that no other policy allows.
    """
    for workload in workloads(documents):
        pod = workload["spec"]["template"]["spec"]
        name = workload["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        assert not any("hostPath" in volume for volume in pod["volumes"]), name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "memory" in container["resources"]["limits"], name
    [deny] = find(documents, "NetworkPolicy", "deny-all")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def check_references(documents: list[dict[str, Any]]) -> None:
    """Every selector selects a pod, and every referenced account, mount and port exists."""
    pods = {each["metadata"]["name"]: each["spec"]["template"] for each in workloads(documents)}
    labels = [{**pod["metadata"]["labels"], "app.kubernetes.io/part-of": "kvmesh"} for pod in pods.values()]
    ports = {
        name: {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]} for name, pod in pods.items()
    }
    accounts = {each["metadata"]["name"] for each in find(documents, "ServiceAccount")}
    for name, pod in pods.items():
        spec = pod["spec"]
        assert spec["serviceAccountName"] in accounts
        volumes = {each["name"] for each in spec["volumes"]} | ({"data"} if name == "consul-server" else set())
        for container in spec["containers"]:
            assert {each["name"] for each in container["volumeMounts"]} <= volumes, name
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    action = container[probe].get("httpGet") or container[probe]["tcpSocket"]
                    assert action["port"] in ports[name], name
    for document in [*find(documents, "Service"), *find(documents, "PodDisruptionBudget")]:
        selector = document["spec"]["selector"]
        wanted = selector.get("matchLabels", selector)
        chosen = [name for name, pod in pods.items() if wanted.items() <= pod["metadata"]["labels"].items()]
        assert len(chosen) == 1, document["metadata"]["name"]
        for port in document["spec"].get("ports", []):
            if isinstance(port.get("targetPort"), str):
                assert port["targetPort"] in ports[chosen[0]]
    for policy in find(documents, "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        assert any(selects(selector, each) for each in labels), policy["metadata"]["name"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def check_settings(documents: list[dict[str, Any]]) -> None:
    """Each variable is a setting of its role and is set once. The termination grace period is long enough for a drain."""
    shared = find(documents, "ConfigMap", "mesh")[0]["data"]
    for role, settings in ROLES.items():
        known = {each.variable for each in specs(settings)}
        [workload] = find(documents, "Deployment", role)
        spec = workload["spec"]["template"]["spec"]
        [container] = spec["containers"]
        names = [each["name"] for each in container["env"]]
        assert len(set(names)) == len(names), role
        assert {name for name in [*names, *shared] if name.startswith("KVMESH_")} <= known, role
        assert container["command"] == ["python", "-m", f"services.{role}"]
        lifecycle = FrontendSettings().lifecycle
        assert spec["terminationGracePeriodSeconds"] >= 20 + lifecycle.drain_timeout_s + STOP_TIMEOUT_S - (
            0 if role in ("frontend", "prefill", "decode") else 30
        )


@pytest.mark.parametrize("check", [check_schemas, check_restricted, check_references, check_settings])
def test_the_base(check: Any) -> None:
    check(base())


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays(name: str) -> None:
    """The checks of the base hold for every rendered overlay."""
    documents = rendered(ROOT / "overlays" / name)
    check_schemas(documents, VERSIONS[-1:])
    for check in (check_restricted, check_references, check_settings):
        check(documents)


@pytest.mark.parametrize("component", COMPONENTS)
def test_patches_change_existing_workloads(component: str) -> None:
    """A patch of a workload or container that the base lacks would add a second one."""
    folder = ROOT / "components" / component
    described = yaml.safe_load((folder / "kustomization.yaml").read_text())
    patches = [each["path"] for each in described.get("patches", [])]
    assert {*patches, *described.get("resources", [])} == {p.name for p in folder.glob("*.yaml")} - {
        "kustomization.yaml"
    }
    for path in patches:
        [patch] = read(folder / path)
        [target] = find(base(), patch["kind"], patch["metadata"]["name"])
        if patch["kind"] == "Deployment":
            containers = {each["name"] for each in target["spec"]["template"]["spec"]["containers"]}
            assert {each["name"] for each in patch["spec"]["template"]["spec"]["containers"]} <= containers
    check_schemas([document for name in described.get("resources", []) for document in read(folder / name)])


def test_tls_leaves_no_plain_text() -> None:
    """The overlay with TLS removes the permission to listen in plain text, and gives each role its own credentials."""
    documents = rendered(ROOT / "overlays" / "tls")
    assert "KVMESH_INSECURE_LISTEN" not in find(documents, "ConfigMap", "mesh")[0]["data"]
    for role in ROLES:
        volumes = find(documents, "Deployment", role)[0]["spec"]["template"]["spec"]["volumes"]
        assert {"secretName": f"credentials-{role}", "defaultMode": 0o440} in [each.get("secret") for each in volumes]


def test_keda_scales_existing_workloads() -> None:
    """KEDA's objects name workloads of the base, the planner's Service, and the model that the workers serve."""
    objects = read(ROOT / "components" / "keda" / "scaled-objects.yaml")
    assert {each["metadata"]["name"] for each in objects} == {"prefill", "decode"}
    for each in objects:
        spec, role = each["spec"], each["metadata"]["name"]
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": role}
        assert spec["minReplicaCount"] >= 1
        [trigger] = spec["triggers"]
        assert trigger["type"] == "external"
        env = find(base(), "Deployment", role)[0]["spec"]["template"]["spec"]["containers"][0]["env"]
        [model] = [variable["value"] for variable in env if variable["name"] == "KVMESH_SERVED_NAME"]
        address = "planner.kvmesh.svc.cluster.local:7000"
        assert trigger["metadata"] == {"scalerAddress": address, "model": model, "role": role}


def test_the_checks_can_fail() -> None:
    """The checks find an unknown field and a container with a writable root file system."""
    documents = base()
    deployment = find(documents, "Deployment", "router")[0]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["securityContext"]["readOnlyRootFilesystem"] = False
    with pytest.raises(AssertionError):
        check_restricted(documents)
    container["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schemas(documents)
