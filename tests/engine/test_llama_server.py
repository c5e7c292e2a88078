"""A real llama-server over real RPC devices: layers, bytes and text land where the plan put them."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any

import psutil
import pytest
import yaml

from llamarack.config import Group, parse
from llamarack.engine import ADAPTORS
from llamarack.engine.adaptor import LaunchContext
from llamarack.engine.builds import build_of, with_rpc_devices
from llamarack.engine.device_memory import term_checks
from llamarack.engine.llamacpp import BINARY_KEY_VARIABLE, LlamaCpp, binary_of
from llamarack.engine.llamacpp_binary import FIT_PARAMS, ask_binary, devices_of
from llamarack.errors import ConfigError, DoesNotFit, HardwareError, ModelError, NeverReady
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Machine
from llamarack.model.demo import demo_model
from llamarack.model.read import read_model
from llamarack.paths import cache_dir
from llamarack.plan.dry_run import dry_run
from llamarack.supervise.layout import lay_out
from llamarack.units import MIB
from tests.native import find_llama_server, rpc_servers

pytestmark = pytest.mark.native
_DEADLINE_S = 120.0
_TOKENS = 24
_PROMPT = "The three primary colours are"
_TIE_LOGPROB = 0.1


@pytest.fixture(scope="module")
def binary() -> Path:
    return find_llama_server()


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def devices(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with rpc_servers(binary, 3, tmp_path_factory.mktemp("rpc")) as addresses:
        yield addresses


class _Connection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=_DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(_DEADLINE_S)
        self.sock.connect(str(self._path))


class _Started:
    """One replica as laid out, launched without a rack."""

    def __init__(self, file: dict[str, Any], folder: Path) -> None:
        model = {"name": "m", "limits": {"context_tokens": 1024, "sequences": 2}, **file}
        self.deployment = parse(yaml.safe_dump({"models": [model]})).deployment
        self.group: Group = self.deployment.models[0].groups[0]
        machine = detect_machine()
        machine = with_rpc_devices(Machine(host=machine.host, cards=()), [self.group])
        path = self.deployment.models[0].path
        specs = {path: read_model(path)}
        (self.spec,) = lay_out(self.deployment, machine, specs, build_of=lambda group: build_of(group, machine))
        context = LaunchContext(
            replica="m-0",
            model=self.spec.model,
            group=self.group,
            path=path,
            candidate=self.spec.candidate,
            card_uuids=(),
            files=folder,
            socket=folder / "e.sock",
            key="secret-of-this-test",
        )
        ADAPTORS["llamacpp"].prepare(self.group, on_cards=False)
        self.launch = ADAPTORS["llamacpp"].launch(context)
        self.log = folder / "engine.log"
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(self.launch.argv, env=self.launch.env, stdout=output, stderr=output)

    def until_ready(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.ask("GET", "/health")[0] == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(self.log.read_text(errors="replace")[-3000:])

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, Any]:
        assert self.launch.endpoint.socket is not None
        with contextlib.closing(_Connection(self.launch.endpoint.socket)) as connection:
            headers = {"Authorization": f"Bearer {key or self.launch.endpoint.key}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")

    @property
    def log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def tokens(self) -> list[tuple[str, dict[str, float]]]:
        """Each token of a greedy answer, with the log-probabilities of the likeliest."""
        body = {"prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 0, "logprobs": 3, "cache_prompt": False}
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        content = answer["choices"][0]["logprobs"]["content"]
        return [(one["token"], {top["token"]: top["logprob"] for top in one["top_logprobs"]}) for one in content]


@contextlib.contextmanager
def started(folder: Path, **file: Any) -> Iterator[_Started]:
    engine = _Started(file, folder)
    try:
        engine.until_ready()
        yield engine
    finally:
        engine.process.kill()
        engine.process.wait()


@pytest.fixture(scope="module")
def one_device(
    binary: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, dict[str, float]]]:
    with started(tmp_path_factory.mktemp("one"), path=str(model), engine_binary=str(binary)) as engine:
        return engine.tokens()


def _same_up_to_ties(reference: list[tuple[str, dict[str, float]]], other: list[tuple[str, dict[str, float]]]) -> bool:
    """Whether both are one text, or part where the reference's own two likeliest tokens are as good as equal."""
    assert len(reference) == len(other) == _TOKENS
    for (token, tops), (given, _) in zip(reference, other, strict=True):
        if token != given:
            return given in tops and tops[token] - tops[given] < _TIE_LOGPROB
    return True


@pytest.mark.parametrize(
    "shares",
    [(0.7, 0.3), (0.5, 0.5), (80 / 104, 24 / 104), (0.5, 0.3, 0.2)],
    ids=["70:30", "50:50", "80:24", "50:30:20"],
)
def test_layers_bytes_and_text_are_where_the_plan_put_them(
    binary: Path, model: Path, devices: list[str], one_device: Any, tmp_path: Path, shares: tuple[float, ...]
) -> None:
    servers = devices[: len(shares)]
    split = {"rpc_servers": servers, "tensor_split": [round(share, 4) for share in shares]}
    with started(tmp_path, path=str(model), engine_binary=str(binary), **split) as engine:
        lines = engine.log_lines
        text = engine.tokens()
    assert "secret-of-this-test" not in " ".join(engine.launch.argv)
    assert engine.launch.env[BINARY_KEY_VARIABLE] == "secret-of-this-test"
    told = LlamaCpp().device_terms(lines)
    assert [device.device for device in told] == [f"RPC0[{server}]" for server in servers]
    cards = engine.spec.candidate.cards
    checks = term_checks(cards, told)
    assert len(checks) == 3 * len(shares)
    assert {check.term: check.error_fraction for check in checks if abs(check.error_fraction or 0) > 0.01} == {}
    for card, device in zip(cards, told, strict=True):
        assert card.total_bytes == pytest.approx(sum(device.terms.values()), rel=0.01)
        assert sum(device.terms.values()) <= card.total_high_bytes
    LlamaCpp().require_planned(engine.spec.candidate, engine.group, lines)
    assert any("offloaded 31/31 layers" in line for line in lines)
    assert _same_up_to_ties(one_device, text)


def test_equal_free_memory_gives_equal_shares_and_a_bigger_device_more(
    binary: Path, model: Path, devices: list[str]
) -> None:
    spec = read_model(model)

    def split(*servers: str) -> tuple[float, ...]:
        file = {"name": "m", "path": str(model), "engine_binary": str(binary), "rpc_servers": list(servers)}
        deployment = parse(yaml.safe_dump({"models": [file]})).deployment
        machine = with_rpc_devices(Machine(host=detect_machine().host), deployment.models[0].groups)
        (replica,) = lay_out(deployment, machine, {model: spec})
        assert replica.candidate.tensor_split is not None
        return replica.candidate.tensor_split

    assert split(*devices[:2]) == (0.5, 0.5)
    large, small = split(f"{devices[0]}=80GiB", f"{devices[1]}=24GiB")
    assert large == pytest.approx(80 / 104, abs=0.005)
    assert large + small == pytest.approx(1)


def test_one_of_several_devices_alone_holds_everything(
    binary: Path, model: Path, devices: list[str], one_device: Any, tmp_path: Path
) -> None:
    split = {"rpc_servers": devices[:2], "split_mode": "none", "main_gpu": 1}
    with started(tmp_path, path=str(model), engine_binary=str(binary), **split) as engine:
        (device,) = LlamaCpp().device_terms(engine.log_lines)
        text = engine.tokens()
    (card,) = engine.spec.candidate.cards
    assert device.device == f"RPC0[{devices[1]}]"
    assert card.name.endswith(devices[1])
    assert sum(device.terms.values()) == pytest.approx(card.total_bytes, rel=0.01)
    assert _same_up_to_ties(one_device, text)


def test_plan_and_engine_agree_which_device_overflows_first(binary: Path, model: Path, tmp_path: Path) -> None:
    """The second device may take 200 MiB more than it has; half of the model and of the KV cache is more."""
    with rpc_servers(binary, 2, tmp_path) as servers:
        file: dict[str, Any] = {"path": str(model), "engine_binary": str(binary), "tensor_split": [0.5, 0.5]}
        file["limits"] = {"context_tokens": 8192, "sequences": 4}
        with pytest.raises(DoesNotFit) as caught:
            _Started({**file, "rpc_servers": [f"{servers[0]}=2GiB", f"{servers[1]}=200MiB"]}, tmp_path)
        assert f"RPC0 {servers[1]} needs" in caught.value.message
        assert servers[0] not in caught.value.message
        for process in psutil.Process().children():
            if servers[1].rpartition(":")[2] in process.cmdline():
                limit = process.memory_info().vms + 200 * MIB
                process.rlimit(psutil.RLIMIT_AS, (limit, limit))
        engine = _Started({**file, "rpc_servers": [f"{server}=2GiB" for server in servers]}, tmp_path)
        try:
            engine.process.wait(_DEADLINE_S)
        finally:
            engine.process.kill()
            engine.process.wait()
    fault = next(line for line in engine.log_lines if "failed to allocate" in line or "unable to allocate" in line)
    assert servers[1] in fault
    assert LlamaCpp().diagnose("exit code 1", engine.log_lines).cause == "out_of_memory"


def test_tensor_mode_is_one_device_to_the_engine_and_none_to_the_comparison(
    binary: Path, model: Path, devices: list[str], one_device: Any, tmp_path: Path
) -> None:
    split = {"rpc_servers": devices[:2], "split_mode": "tensor"}
    with started(tmp_path, path=str(model), engine_binary=str(binary), **split) as engine:
        lines = engine.log_lines
        text = engine.tokens()
    assert any("using device Meta" in line for line in lines)
    LlamaCpp().require_planned(engine.spec.candidate, engine.group, lines)
    assert LlamaCpp().device_terms(lines) == []
    assert _same_up_to_ties(one_device, text)


def test_a_device_that_is_lost_ends_the_engine_with_its_cause(binary: Path, model: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        stays = stack.enter_context(rpc_servers(binary, 1, tmp_path))
        (tmp_path / "lost").mkdir()
        lost = stack.enter_context(rpc_servers(binary, 1, tmp_path / "lost"))
        split = {"rpc_servers": [*stays, *lost], "tensor_split": [0.5, 0.5]}
        with started(tmp_path, path=str(model), engine_binary=str(binary), **split) as engine:
            for process in psutil.Process().children():
                if lost[0].rpartition(":")[2] in process.cmdline():
                    process.kill()
            with contextlib.suppress(OSError, HTTPException, ValueError):
                engine.tokens()
            engine.process.wait(_DEADLINE_S)
            diagnosis = LlamaCpp().diagnose("signal 6", engine.log_lines)
    assert diagnosis.cause == "rpc_server_lost"
    assert "of one llama.cpp build" in str(diagnosis.hint)


def test_fewer_layers_on_the_devices_are_planned_and_read_back(
    binary: Path, model: Path, devices: list[str], tmp_path: Path
) -> None:
    split = {"rpc_servers": devices[:2], "tensor_split": [0.5, 0.5], "gpu_layers": 11}
    with started(tmp_path, path=str(model), engine_binary=str(binary), **split) as engine:
        lines = engine.log_lines
    told = LlamaCpp().device_terms(lines)
    for card, device in zip(engine.spec.candidate.cards, told, strict=True):
        assert sum(device.terms.values()) == pytest.approx(card.total_bytes, rel=0.01)
    LlamaCpp().require_planned(engine.spec.candidate, engine.group, lines)
    everything = replace(engine.group, gpu_layers="all")
    with pytest.raises(NeverReady, match="put 11 of 31 layers on its devices, 31 were planned"):
        LlamaCpp().require_planned(engine.spec.candidate, everything, lines)


def test_the_engines_dry_run_agrees_with_the_plan(binary: Path, model: Path, devices: list[str]) -> None:
    file = {"name": "m", "path": str(model), "engine_binary": str(binary), "rpc_servers": devices[:2]}
    deployment = parse(yaml.safe_dump({"models": [{**file, "tensor_split": [0.7, 0.3]}]})).deployment
    machine = with_rpc_devices(Machine(host=detect_machine().host), deployment.models[0].groups)
    (replica,) = lay_out(deployment, machine, {model: read_model(model)})
    rows = dry_run(binary.with_name(FIT_PARAMS), replica.candidate, model, rpc_servers=devices[:2])
    assert rows is not None
    assert [row.device for row in rows] == ["RPC0", "RPC1", "Host"]
    for card, row in zip(replica.candidate.cards, rows, strict=False):
        assert abs(card.terms.weights_bytes - row.weights_bytes) <= MIB
        assert abs(card.terms.kv_bytes - row.kv_bytes) <= MIB
        assert row.weights_bytes + row.kv_bytes + row.compute_bytes <= card.total_high_bytes


def test_only_the_key_opens_the_engine(binary: Path, model: Path, tmp_path: Path) -> None:
    with started(tmp_path, path=str(model), engine_binary=str(binary), chat_template="chatml") as engine:
        assert engine.ask("GET", "/props", key="another")[0] == 401
        status, props = engine.ask("GET", "/props")
        assert status == 200
        assert props["chat_template"].strip() == (tmp_path / "chat_template.jinja").read_text().strip()
        assert props["total_slots"] == 2
        assert props["default_generation_settings"]["n_ctx"] == 1024
        (device,) = LlamaCpp().device_terms(engine.log_lines)
    (card,) = engine.spec.candidate.cards
    assert device.terms["kv_bytes"] == pytest.approx(card.terms.kv_bytes, rel=0.01)
    assert device.terms["compute_bytes"] == pytest.approx(card.terms.compute_bytes, rel=0.03)


def test_a_server_that_is_not_there_or_busy_is_named(binary: Path, devices: list[str], tmp_path: Path) -> None:
    group = Group(engine_binary=binary, rpc_servers=["127.0.0.1:1"])
    with pytest.raises(HardwareError, match=r"127\.0\.0\.1:1 does not answer") as caught:
        with_rpc_devices(detect_machine(), [group])
    assert "ggml-rpc-server" in str(caught.value.hint)
    found = devices_of(ask_binary(binary), rpc_servers=devices[:1])
    assert [(one.name, one.description) for one in found if one.is_rpc] == [("RPC0", devices[0])]


def test_options_are_checked_against_this_binary(binary: Path, tmp_path: Path) -> None:
    asked = ask_binary(binary, cache=tmp_path)
    assert asked.build is None or asked.build > 10_000
    assert {"ctx-size", "rpc", "tensor-split", "fit"} <= asked.flags
    for name, message in (
        ("ctx-size", "file models this"),
        ("no_kv_unified", "file models this"),
        ("ctx-sise", "no op"),
    ):
        with pytest.raises(ConfigError, match=message):
            LlamaCpp().prepare(Group(engine_binary=binary, engine_args={name: 1}), on_cards=False)
    LlamaCpp().prepare(Group(engine_binary=binary, engine_args={"slot-prompt-similarity": 0.2}), on_cards=False)
    with pytest.raises(HardwareError, match="built without a GPU device") as caught:
        LlamaCpp().prepare(Group(engine_binary=binary), on_cards=True)
    assert "gpus: []" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="no llama-server that runs here"):
        binary_of(Group(engine_binary=Path("/bin/true")), on_cards=False)


def _llamarack(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LLAMARACK_LOAD_LOCK": str(folder / "lock"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "llamarack", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_rack_serves_one_model_from_two_devices(
    binary: Path, model: Path, devices: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rpc.yaml"
    one: dict[str, Any] = {"name": "m", "path": str(model), "engine_binary": str(binary), "rpc_servers": devices[:2]}
    one |= {"tensor_split": [0.7, 0.3], "limits": {"context_tokens": 1024, "sequences": 2}}
    file.write_text(yaml.safe_dump({"models": [one], "gateway": {"port": 0}}))
    state = ["--state-dir", str(tmp_path / "s")]
    planned = _llamarack(tmp_path, "plan", str(file))
    assert planned.returncode == 0, planned.stderr
    assert "2 RPC devices" in planned.stdout
    assert planned.stderr.count("the upper bound covers it") == 2
    done = _llamarack(tmp_path, "serve", str(file), "--detach", *state)
    try:
        assert done.returncode == 0, done.stderr
        record = json.loads(_llamarack(tmp_path, "status", "--json", "--rack", "rpc", *state).stdout)
        terms = record["models"][0]["replicas"][0]["actual"]["terms"]
        assert {term["device"] for term in terms} == {f"RPC0[{server}]" for server in devices[:2]}
        assert all(abs(term["error_fraction"]) <= 0.01 for term in terms)
        port = record["gateway"]["port"]
        talk = [("system", "You are a helpful assistant."), ("user", "What is the capital of France?")]
        body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in talk]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            data=json.dumps({**body, "temperature": 0, "max_tokens": 24}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["message"]["content"]
        # The devices serve our engine and nobody else now; what they said before is still known.
        again = _llamarack(tmp_path, "plan", str(file))
        assert again.returncode == 0, again.stderr
        assert again.stdout.count("busy with another client") == 1
    finally:
        _llamarack(tmp_path, "stop", "--rack", "rpc", *state)
