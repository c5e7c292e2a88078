"""Kubernetes manifests for a deployment: Deployment, Service, ConfigMap, and the claims they need. Pure.

One pod is one rack on one server. With `nodes` every server gets a whole rack of its own, and the Service spreads the
connections: copies of the model.

A model that vLLM spreads over several servers becomes a LeaderWorkerSet, as vLLM documents it (docs/deployment/
frameworks/lws.md): the leader is the rack, the workers run `llamarack node`, and the controller makes all pods anew
when one of them ends. Its own Service has the set's name and gives the leader its address before it is ready.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llamarack.errors import UsageError
from llamarack.ship.compose import dump_all
from llamarack.ship.container import CACHE, FILE, NODE_FILE, PORT, STATE, USER_ID, Contained
from llamarack.ship.service import Cards

# A StatefulSet's name and a hash of 10 make a label of 63 at most; the set's are named NAME-nodes-0.
_SPREAD_NAME_MAX = 43
# Endpoints are taken out while the pod is told to stop; so long new connections still come (Kubernetes, pod lifecycle).
_UNREGISTER_S = 10
_PROBE_S = 10
_PART = "app.kubernetes.io/component"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")  # RFC 1035 label, with room for our endings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`claim`: the PersistentVolumeClaim that holds the models; `nodes`: servers that get a rack each."""

    name: str
    namespace: str
    image: str
    claim: str
    nodes: int

    @property
    def set_name(self) -> str:
        return f"{self.name}-nodes"

    @property
    def leader_address(self) -> str:
        """The name that the controller gives the first pod of the first group: POD.SET.NAMESPACE."""
        return f"{self.set_name}-0.{self.set_name}.{self.namespace}"


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
    if inside.others is not None:
        if cluster.nodes > 1:
            raise UsageError(
                f"`--nodes {cluster.nodes}` makes copies of a rack, and a model of this file spans "
                f"{inside.others.count + 1} nodes by itself",
                hint="leave --nodes out; for a second copy export again with another --name",
            )
        if len(cluster.name) > _SPREAD_NAME_MAX:
            raise UsageError(
                f"`--name {cluster.name}` has {len(cluster.name)} letters; {_SPREAD_NAME_MAX} is the most for a model "
                "that spans nodes",
                hint="--name llamarack",
            )
        leader = {**labels, _PART: "leader"}
        parts = [_config(inside, cluster, labels), _service(cluster, labels, leader)]
        return _head(inside, cluster) + dump_all([*parts, _worker_set(inside, cluster, labels)])
    parts = [_config(inside, cluster, labels), _service(cluster, labels, labels)]
    if cluster.nodes == 1:
        parts.append(_cache(cluster, labels))
    return _head(inside, cluster) + dump_all([*parts, _deployment(inside, cluster, labels)])


def _head(inside: Contained, cluster: Cluster) -> str:
    lines = [
        "Written by `llamarack export kubernetes`. Validated against Kubernetes' schemas; not run on a cluster by",
        "llamarack's tests. It needs, in the namespace:",
        f"- the claim `{cluster.claim}` with what is in {inside.models} here"
        + (", readable from several servers (ReadOnlyMany)" if inside.others or cluster.nodes > 1 else ""),
    ]
    if inside.others is not None:
        lines += [
            "- the LeaderWorkerSet controller (lws.sigs.k8s.io), and pods that reach each other on every port",
            "  vLLM's traffic between servers is neither encrypted nor authenticated: keep others off that network",
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
        "data": {FILE.name: inside.text, **({NODE_FILE.name: inside.others.text} if inside.others else {})},
    }


def _cache(cluster: Cluster, labels: dict[str, str]) -> dict[str, Any]:
    """What engines compile, so that only the first start does. Most storage is attached to one node at a time."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(cluster, labels, "-cache"),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    }


def _service(cluster: Cluster, labels: dict[str, str], selected: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(cluster, labels),
        "spec": {
            "selector": selected,
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
    pod = {
        **_pod(
            inside,
            cluster,
            _rack_container(inside, cluster),
            has_secrets=bool(inside.secrets),
            keeps_cache=cluster.nodes == 1,
        ),
        **({"affinity": anti_affinity} if cluster.nodes > 1 else {}),
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


def _worker_set(inside: Contained, cluster: Cluster, labels: dict[str, str]) -> dict[str, Any]:
    assert inside.others is not None
    rack, node = _rack_container(inside, cluster), _node_container(inside, cluster)
    leader = _pod(inside, cluster, rack, has_secrets=bool(inside.secrets), keeps_cache=False)
    worker = _pod(inside, cluster, node, has_secrets=False, keeps_cache=False)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {**_metadata(cluster, labels), "name": cluster.set_name},
        "spec": {
            "replicas": 1,
            # The rack is ready when the workers have joined, so they must not wait for it.
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": inside.others.count + 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"metadata": {"labels": {**labels, _PART: "leader"}}, "spec": leader},
                "workerTemplate": {"metadata": {"labels": {**labels, _PART: "worker"}}, "spec": worker},
            },
        },
    }


def _pod(
    inside: Contained, cluster: Cluster, container: dict[str, Any], *, has_secrets: bool, keeps_cache: bool
) -> dict[str, Any]:
    return {
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
        "containers": [container],
        "volumes": _volumes(inside, cluster, has_secrets=has_secrets, keeps_cache=keeps_cache),
    }


def _container(
    inside: Contained, cluster: Cluster, arguments: list[str], cards: Cards, *, has_secrets: bool
) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": str(FILE.parent), "readOnly": True},
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "state", "mountPath": str(STATE)},
        {"name": "cache", "mountPath": str(CACHE)},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if has_secrets:
        place = next(iter(inside.secrets)).parent
        mounts.append({"name": "files", "mountPath": str(place), "readOnly": True})
    if inside.has_shared_memory:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    environment: list[dict[str, Any]] = [{"name": "XDG_CACHE_HOME", "value": str(CACHE)}]
    if inside.others is not None:  # what vLLM tells the other nodes of itself
        environment.append({"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return {
        "name": "llamarack",
        "image": cluster.image,
        "args": arguments,
        "env": environment,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        **({"resources": {"limits": {"nvidia.com/gpu": cards.count}}} if cards.count else {}),
    }


def _node_container(inside: Contained, cluster: Cluster) -> dict[str, Any]:
    """No probe: it has no door. It ends when node 0 is gone, and then the controller makes all pods anew."""
    assert inside.others is not None
    arguments = ["node", str(NODE_FILE), "--node-rank", "$(LWS_WORKER_INDEX)"]
    container = _container(inside, cluster, arguments, inside.others.cards, has_secrets=False)
    # All pods are told to stop at once, and what the leader drains needs the workers.
    wait_s = _UNREGISTER_S + inside.timing.drain_s
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(wait_s)]}}}
    return container


def _rack_container(inside: Contained, cluster: Cluster) -> dict[str, Any]:
    def probe(path: str, **numbers: int) -> dict[str, Any]:
        get = {"path": path, "port": "http", **({"scheme": "HTTPS"} if inside.has_tls else {})}
        return {"httpGet": get, "periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S, **numbers}

    return {
        **_container(inside, cluster, ["serve", str(FILE)], inside.cards, has_secrets=bool(inside.secrets)),
        "ports": [{"name": "http", "containerPort": PORT}],
        # The start may take as long as the loads' deadlines together; only then the other probes count.
        "startupProbe": probe("/ready", failureThreshold=-(-inside.timing.start_s // _PROBE_S)),
        "readinessProbe": probe("/ready", failureThreshold=2),
        "livenessProbe": probe("/live", failureThreshold=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNREGISTER_S)]}}},
    }


def _volumes(inside: Contained, cluster: Cluster, *, has_secrets: bool, keeps_cache: bool) -> list[dict[str, Any]]:
    cache: dict[str, Any] = {"persistentVolumeClaim": {"claimName": f"{cluster.name}-cache"}}
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{cluster.name}-config"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}},
        {"name": "state", "emptyDir": {}},
        {"name": "cache", **(cache if keeps_cache else {"emptyDir": {}})},
        {"name": "tmp", "emptyDir": {}},
    ]
    if has_secrets:
        # Not for other users: llamarack refuses a keys file that they can read.
        volumes.append({"name": "files", "secret": {"secretName": f"{cluster.name}-files", "defaultMode": 0o440}})
    if inside.has_shared_memory:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}})
    return volumes
