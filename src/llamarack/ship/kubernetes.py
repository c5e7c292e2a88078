"""Kubernetes manifests for a deployment: Deployment, Service, ConfigMap, and the claims they need. Pure.

One pod is one rack on one server. With `nodes` every server gets a whole rack of its own, and the Service spreads the
connections: replicas of the model, since llamarack cuts a model over the cards of one machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llamarack.errors import UsageError
from llamarack.ship.compose import dump_all
from llamarack.ship.container import CACHE, FILE, PORT, STATE, USER_ID, Contained

# Endpoints are taken out while the pod is told to stop; so long new connections still come (Kubernetes, pod lifecycle).
_UNREGISTER_S = 10
_PROBE_S = 10
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # RFC 1035 label, with room for our endings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`claim`: the PersistentVolumeClaim that holds the models; `nodes`: servers that get a rack each."""

    name: str
    namespace: str
    image: str
    claim: str
    nodes: int


def kubernetes_text(inside: Contained, cluster: Cluster, *, is_insecure_wanted: bool) -> str:
    """Raises UsageError for a rack without keys, which every pod could use, and for names that a cluster refuses."""
    for option, value in (("--name", cluster.name), ("--namespace", cluster.namespace), ("--claim", cluster.claim)):
        if not _NAME.fullmatch(value):
            raise UsageError(f"`{option} {value}` is not small letters, digits and dashes", hint=f"{option} llamarack")
    if inside.is_open and not is_insecure_wanted:
        raise UsageError(
            "gateway.api_keys_file is not set: in a cluster every pod could use the models",
            hint="llamarack keys add alice --file keys.yaml, then gateway: {api_keys_file: keys.yaml}; "
            "or gateway: {insecure: true} if every pod may",
        )
    labels = {"app.kubernetes.io/name": "llamarack", "app.kubernetes.io/instance": cluster.name}
    parts = [_config(inside, cluster, labels), _service(cluster, labels)]
    if cluster.nodes == 1:
        parts.append(_cache(cluster, labels))
    return _head(inside, cluster) + dump_all([*parts, _deployment(inside, cluster, labels)])


def _head(inside: Contained, cluster: Cluster) -> str:
    lines = [
        "Written by `llamarack export kubernetes`. Validated against Kubernetes' schemas; not run on a cluster by",
        "llamarack's tests. It needs, in the namespace:",
        f"- the claim `{cluster.claim}` with what is in {inside.models} here",
    ]
    if inside.secrets:
        files = " ".join(f"--from-file={target.name}={source}" for target, source in inside.secrets.items())
        lines.append(f"- kubectl -n {cluster.namespace} create secret generic {cluster.name}-files {files}")
    if inside.cards.count:
        lines.append("- NVIDIA's device plugin, for nvidia.com/gpu")
    return "".join(f"# {line}\n" for line in lines)


def _metadata(cluster: Cluster, labels: dict[str, str], ending: str = "") -> dict[str, Any]:
    return {"name": cluster.name + ending, "namespace": cluster.namespace, "labels": labels}


def _config(inside: Contained, cluster: Cluster, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(cluster, labels, "-config"),
        "data": {FILE.name: inside.text},
    }


def _cache(cluster: Cluster, labels: dict[str, str]) -> dict[str, Any]:
    """What engines compile, so that only the first start does. Most storage is attached to one node at a time."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(cluster, labels, "-cache"),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    }


def _service(cluster: Cluster, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(cluster, labels),
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _deployment(inside: Contained, cluster: Cluster, labels: dict[str, str]) -> dict[str, Any]:
    anti_affinity = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
            ]
        }
    }
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": _UNREGISTER_S + inside.timing.stop_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"affinity": anti_affinity} if cluster.nodes > 1 else {}),
        "containers": [_container(inside, cluster)],
        "volumes": _volumes(inside, cluster),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(cluster, labels),
        "spec": {
            "replicas": cluster.nodes,
            # Cards are not shared: the old pod gives them back before the new one can start.
            "strategy": {"type": "Recreate"}
            if cluster.nodes == 1
            else {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": inside.timing.start_s * cluster.nodes + 600,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _container(inside: Contained, cluster: Cluster) -> dict[str, Any]:
    def probe(path: str, **numbers: int) -> dict[str, Any]:
        get = {"path": path, "port": "http", **({"scheme": "HTTPS"} if inside.has_tls else {})}
        return {"httpGet": get, "periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S, **numbers}

    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": str(FILE.parent), "readOnly": True},
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "state", "mountPath": str(STATE)},
        {"name": "cache", "mountPath": str(CACHE)},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if inside.secrets:
        place = next(iter(inside.secrets)).parent
        mounts.append({"name": "files", "mountPath": str(place), "readOnly": True})
    if inside.has_shared_memory:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container: dict[str, Any] = {
        "name": "llamarack",
        "image": cluster.image,
        "args": ["serve", str(FILE)],
        "env": [{"name": "XDG_CACHE_HOME", "value": str(CACHE)}],
        "ports": [{"name": "http", "containerPort": PORT}],
        # The start may take as long as the loads' deadlines together; only then the other probes count.
        "startupProbe": probe("/ready", failureThreshold=-(-inside.timing.start_s // _PROBE_S)),
        "readinessProbe": probe("/ready", failureThreshold=2),
        "livenessProbe": probe("/live", failureThreshold=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNREGISTER_S)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if inside.cards.count:
        container["resources"] = {"limits": {"nvidia.com/gpu": inside.cards.count}}
    return container


def _volumes(inside: Contained, cluster: Cluster) -> list[dict[str, Any]]:
    cache: dict[str, Any] = {"persistentVolumeClaim": {"claimName": f"{cluster.name}-cache"}}
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{cluster.name}-config"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}},
        {"name": "state", "emptyDir": {}},
        {"name": "cache", **(cache if cluster.nodes == 1 else {"emptyDir": {}})},
        {"name": "tmp", "emptyDir": {}},
    ]
    if inside.secrets:
        # Not for other users: llamarack refuses a keys file that they can read.
        volumes.append({"name": "files", "secret": {"secretName": f"{cluster.name}-files", "defaultMode": 0o440}})
    if inside.has_shared_memory:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}})
    return volumes
