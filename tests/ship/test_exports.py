"""Service files: what they say follows the deployment file, and the tools of their readers accept them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from llamarack.config import Deployment, parse
from llamarack.errors import UsageError
from llamarack.ship.compose import compose_node_text, compose_text
from llamarack.ship.container import contained
from llamarack.ship.kubernetes import Cluster, kubernetes_text
from llamarack.ship.service import cards_of, renumbered, timing
from llamarack.ship.spread import required_spread
from llamarack.ship.systemd import NodeUnit, Unit, node_unit_text, unit_text
from llamarack.units import GIB

TWO_CARDS = """
models:
  - name: a
    path: /data/models/a/a.gguf
    replicas: 2
    gpus: [[2], [5]]
    chat_template: /data/models/a/own.jinja
  - name: b
    path: /data/models/b-hf
    engine: vllm
    gpus: [[5, 3]]
    tensor_parallel: 2
gateway: {host: 0.0.0.0, port: 9000, api_keys_file: /etc/keys.yaml, tls_cert: /etc/c.pem, tls_key: /etc/k.pem}
supervise: {drain_s: 45}
"""
SPREAD = """
models:
  - name: small
    path: /data/models/a/a.gguf
    gpus: [[0]]
  - name: big
    path: /data/models/b-hf
    engine: vllm
    gpus: [[2, 3]]
    tensor_parallel: 4
    engine_args: {nnodes: 2, node_rank: 0, master_addr: 10.0.0.1, master-port: 29501}
gateway: {host: 10.0.0.1, port: 9000, api_keys_file: /etc/keys.yaml}
supervise: {drain_s: 45}
"""
OPEN = "models: [{name: a, path: /data/a.gguf, gpus: []}]"
WEIGHTS = {Path("/data/models/a/a.gguf"): 8 * GIB, Path("/data/models/b-hf"): 26 * GIB}
CLUSTER = Cluster(name="rack", namespace="ai", image="reg/llamarack:1", claim="models", nodes=1)


def _deployment(text: str) -> Deployment:
    return parse(text).deployment


def _compose(text: str) -> dict[str, Any]:
    written = compose_text(contained(_deployment(text), WEIGHTS), image="llamarack:1", owner=None)
    value: dict[str, Any] = yaml.safe_load(written)
    return value


def _kubernetes(text: str, cluster: Cluster = CLUSTER, *, insecure: bool = False) -> dict[str, dict[str, Any]]:
    written = kubernetes_text(contained(_deployment(text), WEIGHTS), cluster, is_insecure_wanted=insecure)
    return {part["kind"]: part for part in yaml.safe_load_all(written)}


def test_start_time_is_the_sum_of_the_loads_and_stop_time_holds_the_drain() -> None:
    found = timing(_deployment(TWO_CARDS), WEIGHTS)
    assert found.start_s == 2 * (300 + 20 * 8) + (300 + 20 * 26) + 60
    assert found.stop_s == 45 + 90


def test_cards_are_counted_from_0_inside() -> None:
    deployment = _deployment(TWO_CARDS)
    cards = cards_of(deployment)
    assert cards.named == (2, 3, 5)
    inside = renumbered(deployment, cards)
    assert [model.groups[0].gpus for model in inside.models] == [[[0], [2]], [[2, 1]]]
    assert cards_of(_deployment(OPEN)).count == 0
    auto = cards_of(_deployment("models: [{name: a, path: /a.gguf, replicas: 3}]"))
    assert (auto.named, auto.count) == (None, 3)
    with pytest.raises(UsageError, match="some groups name their `gpus`"):
        cards_of(_deployment("models: [{name: a, path: /a.gguf, gpus: [0]}, {name: b, path: /b.gguf}]"))


def test_inside_the_container_every_path_is_mounted() -> None:
    inside = contained(_deployment(TWO_CARDS), WEIGHTS)
    deployment = _deployment(inside.text)  # read as the container will read it
    assert inside.models == Path("/data/models")
    assert [str(model.path) for model in deployment.models] == ["/models/a/a.gguf", "/models/b-hf"]
    assert deployment.models[0].chat_template == "/models/a/own.jinja"
    assert inside.secrets[PurePosixPath("/run/llamarack-secrets/keys.yaml")] == Path("/etc/keys.yaml")
    assert str(deployment.gateway.tls_key) == "/run/llamarack-secrets/k.pem"
    assert deployment.gateway.host == "0.0.0.0"
    assert not deployment.gateway.insecure


def test_what_an_image_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match="engine_python names a place on this machine"):
        contained(_deployment("models: [{name: a, path: /a/a.gguf, engine_python: /venv/bin/python}]"), {})
    with pytest.raises(UsageError, match="no folder in common"):
        contained(_deployment("models: [{name: a, path: /a/a.gguf}, {name: b, path: /b/b.gguf}]"), {})


def test_compose_gives_cards_shared_memory_and_time() -> None:
    service = _compose(TWO_CARDS)["services"]["llamarack"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "capabilities": ["gpu"], "device_ids": ["2", "3", "5"]}
    assert service["shm_size"] == "10g"
    assert service["ports"] == ["9000:8080"]
    assert service["stop_grace_period"] == "135s"
    assert service["healthcheck"]["start_period"] == "1800s"
    assert service["read_only"] is True
    assert not service["user"].startswith("0")
    bare = _compose(OPEN)["services"]["llamarack"]
    assert bare["ports"] == ["127.0.0.1:8080:8080"]  # without keys for this machine alone
    assert "deploy" not in bare
    assert "shm_size" not in bare


def test_kubernetes_waits_for_the_load_and_for_the_drain() -> None:
    parts = _kubernetes(TWO_CARDS)
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 1800
    assert probe["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTPS"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + 45 + 90
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 3}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}} in pod["volumes"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert parts["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    several = _kubernetes(TWO_CARDS, Cluster(**{**_fields(CLUSTER), "nodes": 3}))
    assert several["Deployment"]["spec"]["replicas"] == 3
    assert "podAntiAffinity" in several["Deployment"]["spec"]["template"]["spec"]["affinity"]


def _fields(cluster: Cluster) -> dict[str, Any]:
    return {name: getattr(cluster, name) for name in cluster.__slots__}


def test_rack_without_keys_is_not_put_into_a_cluster() -> None:
    with pytest.raises(UsageError, match="every pod could use the models") as caught:
        _kubernetes(OPEN)
    assert "llamarack keys add" in str(caught.value.hint)
    assert (
        "resources" not in _kubernetes(OPEN, insecure=True)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    )
    with pytest.raises(UsageError, match="--name Rack_1"):
        _kubernetes(TWO_CARDS, Cluster(**{**_fields(CLUSTER), "name": "Rack_1"}))


def _spread(cluster: Cluster = CLUSTER) -> str:
    inside = contained(_deployment(SPREAD), WEIGHTS, node_0=cluster.leader_address)
    return kubernetes_text(inside, cluster, is_insecure_wanted=False)


def test_model_over_several_nodes_is_a_leader_with_the_rack_and_workers_with_their_part() -> None:
    parts = {part["kind"]: part for part in yaml.safe_load_all(_spread())}
    assert set(parts) == {"ConfigMap", "Service", "LeaderWorkerSet"}
    spec = parts["LeaderWorkerSet"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert spec["startupPolicy"] == "LeaderCreated"  # the leader is ready only once the workers have joined
    leader, worker = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    assert leader["containers"][0]["args"] == ["serve", "/etc/llamarack/rack.yaml"]
    assert worker["containers"][0]["args"] == [
        "node", "/etc/llamarack/node.yaml", "--node-rank", "$(LWS_WORKER_INDEX)",
    ]  # fmt: skip
    assert leader["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 3}  # the other model's card as well
    assert worker["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "readinessProbe" in leader["containers"][0]
    assert "readinessProbe" not in worker["containers"][0]
    for pod in (leader, worker):
        (container,) = pod["containers"]
        assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
        assert [one["name"] for one in container["env"]] == ["XDG_CACHE_HOME", "VLLM_HOST_IP"]
    assert "files" not in json.dumps(worker)  # no key on a server that answers nobody
    # What the leader drains needs the workers, and all are told to stop at once.
    wait_s = int(worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert wait_s == int(leader["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]) + 45
    assert worker["terminationGracePeriodSeconds"] > wait_s
    # The Service must not take the set's name, which the controller gives a Service of its own, nor reach workers.
    service, name = parts["Service"], parts["LeaderWorkerSet"]["metadata"]["name"]
    assert service["metadata"]["name"] != name
    assert service["spec"]["selector"].items() <= group["leaderTemplate"]["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= group["workerTemplate"]["metadata"]["labels"].items()
    files = parts["ConfigMap"]["data"]
    for file in ("rack.yaml", "node.yaml"):
        big = parse(files[file]).deployment.models[-1]
        assert big.groups[0].engine_args["master-addr"] == f"{name}-0.{name}.ai"
        assert "master_addr" not in big.groups[0].engine_args
    inside = parse(files["rack.yaml"]).deployment
    assert [model.groups[0].gpus for model in inside.models] == [[[0]], [[1, 2]]]
    (part,) = parse(files["node.yaml"]).deployment.models
    assert (part.name, part.groups[0].gpus) == ("big", [[0, 1]])


def test_model_over_several_nodes_gets_a_compose_file_for_each() -> None:
    inside = contained(_deployment(SPREAD), WEIGHTS, is_on_host_network=True)
    first = yaml.safe_load(compose_text(inside, image="i", owner=None))
    second = yaml.safe_load(compose_node_text(inside, 1, image="i", owner=None))
    for value in (first, second):
        service = value["services"]["llamarack"]
        assert service["network_mode"] == "host"  # vLLM chooses ports by itself
        assert "ports" not in service  # which the host's network has no room for
        assert "VLLM_HOST_IP" in service["environment"]
        assert service["shm_size"] == "10g"
    rack, node = first["services"]["llamarack"], second["services"]["llamarack"]
    assert rack["command"][0] == "serve"
    assert "http://10.0.0.1:9000/ready" in rack["healthcheck"]["test"][-1]
    gateway = parse(first["configs"]["rack"]["content"]).deployment.gateway
    assert (gateway.host, gateway.port, gateway.insecure) == ("10.0.0.1", 9000, False)
    assert node["command"] == ["node", "/etc/llamarack/node.yaml", "--node-rank", "1"]
    assert node["restart"] == "always"
    assert "healthcheck" not in node
    assert "keys.yaml" not in json.dumps(second)
    (device,) = node["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["2", "3"]
    with pytest.raises(UsageError, match="--node-rank 2") as caught:
        required_spread(_deployment(SPREAD), 2)
    assert caught.value.hint == "--node-rank 0 to 1"
    with pytest.raises(UsageError, match="span 1 node"):
        required_spread(_deployment(OPEN), 1)


def test_what_cannot_span_nodes_is_refused_with_what_to_type() -> None:
    several = Cluster(**{**_fields(CLUSTER), "nodes": 3})
    with pytest.raises(UsageError, match="spans 2 nodes by itself"):
        _spread(several)
    with pytest.raises(UsageError, match="has 44 letters; 43 is the most"):
        _spread(Cluster(**{**_fields(CLUSTER), "name": "a" * 44}))
    with pytest.raises(UsageError, match="replicas: 2 copies"):
        contained(
            _deployment(SPREAD.replace("    tensor", "    replicas: 2\n    tensor").replace("[[2, 3]]", "auto")), {}
        )
    twice = SPREAD.replace(
        "    path: /data/models/a/a.gguf\n    gpus: [[0]]",
        SPREAD.partition("name: big\n")[2].partition("gateway")[0].rstrip(),
    )
    with pytest.raises(UsageError, match="`small`, `big` all span several nodes"):
        contained(_deployment(twice), {})


def _validator(name: str) -> str:
    """A tool of the `validate` extra or of Debian."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here (pip install -e '.[validate]'; Debian: systemd)")
    return found


def _accepts(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize("text", [TWO_CARDS, OPEN])
def test_compose_specification_accepts_it(tmp_path: Path, text: str) -> None:
    tool = _validator("check-jsonschema")
    file = tmp_path / "compose.yaml"
    file.write_text(compose_text(contained(_deployment(text), WEIGHTS), image="llamarack:1", owner=(1000, 1000)))
    _accepts(tool, "--builtin-schema", "vendor.compose-spec", str(file))
    file.write_text(file.read_text().replace("stop_grace_period", "stop_grace_periods"))
    with pytest.raises(AssertionError):
        _accepts(tool, "--builtin-schema", "vendor.compose-spec", str(file))


@pytest.mark.process
def test_compose_specification_accepts_the_file_of_each_node(tmp_path: Path) -> None:
    tool = _validator("check-jsonschema")
    inside = contained(_deployment(SPREAD), WEIGHTS, is_on_host_network=True)
    for rank, text in enumerate(
        (compose_text(inside, image="i", owner=None), compose_node_text(inside, 1, image="i", owner=None))
    ):
        file = tmp_path / f"compose-{rank}.yaml"
        file.write_text(text)
        _accepts(tool, "--builtin-schema", "vendor.compose-spec", str(file))


@pytest.mark.process
@pytest.mark.parametrize("nodes", [1, 3])
def test_schemas_of_kubernetes_accept_it(tmp_path: Path, nodes: int) -> None:
    tool = _validator("kubernetes-validate")
    cluster = Cluster(**{**_fields(CLUSTER), "nodes": nodes})
    file = tmp_path / "llamarack.yaml"
    file.write_text(kubernetes_text(contained(_deployment(TWO_CARDS), WEIGHTS), cluster, is_insecure_wanted=False))
    _accepts(tool, "--strict", str(file))
    file.write_text(file.read_text().replace("terminationGracePeriodSeconds", "terminationGraceSeconds"))
    with pytest.raises(AssertionError):
        _accepts(tool, "--strict", str(file))


@pytest.mark.process
def test_schemas_accept_the_set_and_the_pods_in_it(tmp_path: Path) -> None:
    """Kubernetes' schemas know no LeaderWorkerSet: its pods are held against that of a Pod, and the rest against its
    fields as its API has them (leaderworkerset.x-k8s.io/v1)."""
    kubernetes, json_schema = _validator("kubernetes-validate"), _validator("check-jsonschema")
    parts = list(yaml.safe_load_all(_spread()))
    worker_set = next(part for part in parts if part["kind"] == "LeaderWorkerSet")
    file, own = tmp_path / "llamarack.yaml", tmp_path / "set.yaml"

    def write() -> None:
        group = worker_set["spec"]["leaderWorkerTemplate"]
        pods = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, **group[name]["metadata"]},
                **_spec(group[name]),
            }
            for name in ("leaderTemplate", "workerTemplate")
        ]
        file.write_text(yaml.safe_dump_all([part for part in parts if part is not worker_set] + pods))
        own.write_text(yaml.safe_dump(worker_set))

    def _spec(template: dict[str, Any]) -> dict[str, Any]:
        assert set(template) == {"metadata", "spec"}
        return {"spec": template["spec"]}

    schema = str(Path(__file__).with_name("leader_worker_set.schema.json"))
    write()
    _accepts(kubernetes, "--strict", str(file))
    _accepts(json_schema, "--schemafile", schema, str(own))
    pod = worker_set["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    pod["terminationGraceSeconds"] = pod.pop("terminationGracePeriodSeconds")
    write()
    with pytest.raises(AssertionError):
        _accepts(kubernetes, "--strict", str(file))
    worker_set["spec"]["startupPolicy"] = "LeaderFirst"
    write()
    with pytest.raises(AssertionError):
        _accepts(json_schema, "--schemafile", schema, str(own))


def _unit(**changes: Any) -> Unit:
    values: dict[str, Any] = {
        "command": ("/bin/true",),
        "file": Path("/etc/my racks/100%.yaml"),
        "rack": "rack",
        "port": 8080,
        "user": "root",
        "timing": timing(_deployment(TWO_CARDS), WEIGHTS),
        "models": (Path("/data/models"),),
    }
    return Unit(**{**values, **changes})


def _settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def test_unit_has_time_to_load_to_drain_and_is_watched() -> None:
    settings = _settings(unit_text(_unit()))
    assert settings["Type"] == "notify"
    assert settings["TimeoutStartSec"] == "1800"
    assert settings["TimeoutStopSec"] == "135"
    assert settings["WatchdogSec"] == "60"
    assert settings["KillMode"] == "process"
    assert settings["ExecStart"] == '/bin/true serve "/etc/my racks/100%%.yaml" --rack rack'
    assert settings["CapabilityBoundingSet"] == ""
    assert _settings(unit_text(_unit(port=443)))["AmbientCapabilities"] == "CAP_NET_BIND_SERVICE"
    mine = _settings(unit_text(_unit(user=None)))
    assert "User" not in mine
    assert mine["WantedBy"] == "default.target"


@pytest.mark.process
@pytest.mark.parametrize("user", ["root", None])
def test_systemd_accepts_the_unit(tmp_path: Path, user: str | None) -> None:
    tool = _validator("systemd-analyze")
    file = tmp_path / "llamarack-rack.service"
    file.write_text(unit_text(_unit(user=user)))
    done = subprocess.run([tool, "verify", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert file.name not in done.stderr  # not one warning about it
    file.write_text(unit_text(_unit(user=user)).replace("WatchdogSec", "WatchdogSecs"))
    done = subprocess.run([tool, "verify", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert "WatchdogSecs" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("user", ["root", None])
def test_systemd_accepts_the_unit_of_another_node(tmp_path: Path, user: str | None) -> None:
    unit = NodeUnit(
        command=("/bin/true",),
        file=Path("/etc/rack.yaml"),
        rack="rack",
        rank=1,
        user=user,
        models=(Path("/data/models"),),
    )
    settings = _settings(node_unit_text(unit))
    assert settings["ExecStart"] == "/bin/true node /etc/rack.yaml --node-rank 1"
    assert settings["Restart"] == "always"  # when node 0 is gone, it waits for the next one
    tool = _validator("systemd-analyze")
    file = tmp_path / f"{unit.name}.service"
    file.write_text(node_unit_text(unit))
    done = subprocess.run([tool, "verify", str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert file.name not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("kind", ["systemd", "compose", "kubernetes"])
def test_commands_print_it(tmp_path: Path, kind: str) -> None:
    from tests.tiny_model import write_tiny_llama

    write_tiny_llama(tmp_path / "m.gguf")
    file = tmp_path / "rack.yaml"
    file.write_text("models: [{name: m, path: m.gguf, gpus: []}]\ngateway: {insecure: true}\n")
    command = [sys.executable, "-m", "llamarack", "export", kind, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if kind == "systemd":
        assert _settings(done.stdout)["Type"] == "notify"
        return
    parts = list(yaml.safe_load_all(done.stdout))
    assert "/models/m.gguf" in json.dumps(parts)
    assert str(tmp_path) in json.dumps(parts) or kind == "kubernetes"
