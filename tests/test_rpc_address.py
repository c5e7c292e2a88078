"""Addresses of RPC servers: what is taken, and why the rest is refused, by line and with what to type."""

import pytest

from llamarack.config import parse
from llamarack.errors import ConfigError
from llamarack.rpc_address import parse_rpc_address
from llamarack.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "endpoint", "memory"),
    [
        ("127.0.0.1:50052", "127.0.0.1:50052", ()),
        ("localhost:1", "127.0.0.1:1", ()),
        ("10.1.2.3:50052=24GiB", "10.1.2.3:50052", (24 * GIB,)),
        ("192.168.0.9:65535=80GiB,512MiB", "192.168.0.9:65535", (80 * GIB, 512 * MIB)),
        ("100.64.0.1:00052", "100.64.0.1:52", ()),
    ],
)
def test_private_addresses_are_taken(text: str, endpoint: str, memory: tuple[int, ...]) -> None:
    address = parse_rpc_address(text)
    assert (address.endpoint, address.memory_bytes) == (endpoint, memory)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8.8.8.8:50052", "neither loopback nor private"),
        ("172.32.0.1:50052", "neither loopback nor private"),
        ("0.0.0.0:50052", "neither loopback nor private"),
        ("gpu-box:50052", "no IPv4 address"),
        ("[::1]:50052", "no IPv4 address"),
        ("10.0.0.1", "no host:port"),
        ("10.0.0.1:0", "no host:port"),
        ("10.0.0.1:70000", "no host:port"),
        ("10.0.0.1:50052=lots", "`lots` is not a size"),
        ("10.0.0.1:50052=24GiB,0", "a device without memory"),
    ],
)
def test_others_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_rpc_address(text)


def _file(more: str) -> str:
    return f"models:\n  - name: m\n    path: m.gguf\n    {more}\n"


@pytest.mark.parametrize(
    ("more", "message", "hint"),
    [
        ("rpc_servers: ['8.8.8.8:50052']", "line 4: `models[0].rpc_servers`: `8.8.8.8` is neither", "SSH tunnel"),
        ("rpc_servers: ['10.0.0.1:1', '10.0.0.1:1']", "`models[0].rpc_servers`: a server is named twice", "each once"),
        ("{engine: vllm, rpc_servers: ['10.0.0.1:1']}", "engine vllm has none", "engine: llamacpp"),
        ("{replicas: 2, rpc_servers: ['10.0.0.1:1']}", "serve one client at a time", "replicas: 1"),
    ],
)
def test_the_file_names_the_field_the_line_and_what_to_type(more: str, message: str, hint: str) -> None:
    text = _file(more) if more.startswith("rpc") else f"models: [{{name: m, path: m.gguf, {more[1:-1]}}}]"
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


def test_two_groups_do_not_share_a_server() -> None:
    group = "{rpc_servers: ['10.0.0.1:1']}"
    with pytest.raises(ConfigError, match=r"two groups name the RPC server 10\.0\.0\.1:1"):
        parse(f"models: [{{name: m, path: m.gguf, groups: [{group}, {group}]}}]")
