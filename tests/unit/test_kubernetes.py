"""The form of deploy/kubernetes: known fields of known types, and ports that are Shoal's own.

No cluster judges it. The schema is of what the manifest uses, in KubeRay's ray.io/v1 and Kubernetes.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.pool.base import limits

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy" / "kubernetes" / "raycluster.yaml"

QUANTITY = re.compile(r"\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
#: A field that must be there begins with "!". {"*": …}: any names. A list has one kind of items.
QUANTITIES = {"*": QUANTITY}
CONTAINER = {
    "!name": NAME, "!image": str, "env": [{"!name": str, "!value": str}],
    "ports": [{"!containerPort": int, "name": re.compile(r"[a-z0-9-]{1,15}")}],
    "!resources": {"requests": QUANTITIES, "!limits": QUANTITIES},
    "volumeMounts": [{"!name": NAME, "!mountPath": re.compile(r"/.*")}],
}  # fmt: skip
POD = {
    "!spec": {
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
        "!containers": [CONTAINER],
        "volumes": [
            {"!name": NAME, "persistentVolumeClaim": {"!claimName": NAME},
             "emptyDir": {"medium": re.compile("Memory"), "sizeLimit": QUANTITY}}
        ],
    }
}  # fmt: skip
META = {"!name": NAME}
SELECTOR = {"!matchLabels": {"*": str}}
SCHEMAS: dict[str, Any] = {
    "RayCluster": {
        "!apiVersion": re.compile("ray.io/v1"), "!kind": str, "!metadata": META,
        "!spec": {
            "!rayVersion": re.compile(r"\d+\.\d+\.\d+"),
            "!authOptions": {"!mode": re.compile("token|disabled")},
            "!headGroupSpec": {"!rayStartParams": {"*": str}, "!template": POD},
            "!workerGroupSpecs": [
                {"!groupName": NAME, "replicas": int, "minReplicas": int, "maxReplicas": int,
                 "!rayStartParams": {"*": str}, "!template": POD}
            ],
        },
    },
    "PersistentVolumeClaim": {
        "!apiVersion": re.compile("v1"), "!kind": str, "!metadata": META,
        "!spec": {
            "!accessModes": [re.compile("ReadWriteOnce")],
            "!resources": {"!requests": {"!storage": QUANTITY}},
        },
    },
    "NetworkPolicy": {
        "!apiVersion": re.compile(r"networking\.k8s\.io/v1"), "!kind": str, "!metadata": META,
        "!spec": {
            "!podSelector": SELECTOR, "!policyTypes": [re.compile("Ingress")],
            "!ingress": [
                {"from": [{"podSelector": SELECTOR}],
                 "ports": [{"!protocol": re.compile("TCP"), "!port": int, "endPort": int}]}
            ],
        },
    },
}  # fmt: skip


def problems(found: Any, schema: Any, where: str = "") -> list[str]:
    """Return what is wrong with a part of a manifest."""
    if isinstance(schema, dict):
        if not isinstance(found, dict):
            return [f"{where} is not a mapping"]
        if "*" in schema:
            return [p for k, v in found.items() for p in problems(v, schema["*"], f"{where}.{k}")]
        fields = {key.removeprefix("!"): value for key, value in schema.items()}
        wrong = [f"{where}.{key} is not known" for key in found if key not in fields]
        wrong += [f"{where}{k.replace('!', '.')} is missing" for k in schema if k[0] == "!"
                  and k[1:] not in found]  # fmt: skip
        for key in found.keys() & fields.keys():
            wrong += problems(found[key], fields[key], f"{where}.{key}")
        return wrong
    if isinstance(schema, list):
        if not isinstance(found, list) or not found:
            return [f"{where} is not a list"]
        return [p for i, one in enumerate(found) for p in problems(one, schema[0], f"{where}[{i}]")]
    if isinstance(schema, re.Pattern):
        return [] if isinstance(found, str) and schema.fullmatch(found) else [f"{where}: {found!r}"]
    return [] if type(found) is schema else [f"{where}: {found!r} is not {schema.__name__}"]


@pytest.fixture
def manifest() -> dict[str, Any]:
    parts = list(yaml.safe_load_all(MANIFEST.read_text()))
    return {part["kind"]: part for part in parts}


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["RayCluster"]["spec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [c for pod in pods for c in pod["template"]["spec"]["containers"]]


def test_every_part_has_the_form_of_its_kind(manifest: dict[str, Any]) -> None:
    assert manifest.keys() == SCHEMAS.keys()
    for kind, part in manifest.items():
        assert not problems(part, SCHEMAS[kind], kind)


def test_the_check_sees_what_is_wrong(manifest: dict[str, Any]) -> None:
    good = manifest["RayCluster"]
    for change, said in (
        (lambda c: c["spec"].update(workers=[]), "RayCluster.spec.workers is not known"),
        (lambda c: c["spec"].pop("headGroupSpec"), "RayCluster.spec.headGroupSpec is missing"),
        (
            lambda c: c["spec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
            "num-cpus",
        ),
        (lambda c: c["spec"].update(workerGroupSpecs=[]), "workerGroupSpecs is not a list"),
        (lambda c: c["metadata"].update(name="Shoal_1"), "metadata.name"),
    ):
        broken = copy.deepcopy(good)
        change(broken)
        found = problems(broken, SCHEMAS["RayCluster"], "RayCluster")
        assert len(found) == 1
        assert said in found[0]


def test_volumes_selectors_and_ports_fit_together(manifest: dict[str, Any]) -> None:
    cluster = manifest["RayCluster"]
    spec = cluster["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])}
        assert mounted == {v["name"] for v in pod.get("volumes", [])}
    claim = spec["headGroupSpec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]
    assert claim["claimName"] == manifest["PersistentVolumeClaim"]["metadata"]["name"]
    policy = manifest["NetworkPolicy"]["spec"]
    label = {"ray.io/cluster": cluster["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == label
    inside, outside = policy["ingress"]
    assert inside["from"][0]["podSelector"]["matchLabels"] == label
    (ports,) = outside["ports"]
    assert ports["port"] == limits.PORT
    assert ports["endPort"] == limits.PORT + limits.DEVICES_PER_NODE_MAX
    head = containers(manifest)[0]
    assert limits.PORT in [p["containerPort"] for p in head["ports"]]
    assert {"name": "SHOAL_STATE", "value": head["volumeMounts"][0]["mountPath"]} in head["env"]


def test_one_image_a_token_and_whole_gpus(manifest: dict[str, Any]) -> None:
    spec = manifest["RayCluster"]["spec"]
    assert spec["authOptions"]["mode"] == "token"
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)
    assert len({c["image"] for c in containers(manifest)}) == 1
    for container in containers(manifest):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
    assert f"ray[default]=={spec['rayVersion']}" in (ROOT / "docs" / "kubernetes.md").read_text()
