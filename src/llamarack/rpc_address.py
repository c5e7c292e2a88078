"""Addresses of llama.cpp's RPC servers as the deployment file gives them. Pure.

`10.0.0.5:50052`, or `10.0.0.5:50052=24GiB,80GiB` with the memory of each of its devices, for planning where the server
cannot be asked. The protocol has no authentication and no encryption: loopback and private addresses only.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from llamarack.units import parse_bytes

# RFC 1918, loopback, link-local, and RFC 6598 (networks of providers and of overlay VPNs).
_PRIVATE = tuple(
    ipaddress.IPv4Network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcAddress:
    """`memory_bytes`: of each device, as given; empty: to be asked from the server."""

    endpoint: str  # `127.0.0.1:50052`, as the engine wants it
    memory_bytes: tuple[int, ...] = ()

    @property
    def is_loopback(self) -> bool:
        return ipaddress.IPv4Address(self.endpoint.rpartition(":")[0]).is_loopback


def parse_rpc_address(text: str) -> RpcAddress:
    """Raises ValueError with the reason and, after a semicolon, what to type."""
    endpoint, given, sizes = text.partition("=")
    host, found, port = endpoint.rpartition(":")
    if not found or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"`{text}` is no host:port; type an address such as 127.0.0.1:50052")
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ValueError(
            f"`{host}` is no IPv4 address (names could come to mean another computer); type the server's address"
        ) from None
    if not any(address in network for network in _PRIVATE):
        raise ValueError(
            f"`{host}` is neither loopback nor private, and the protocol has no authentication; bind the server to a "
            "private network or reach it through an SSH tunnel on 127.0.0.1"
        )
    memory: tuple[int, ...] = ()
    if given:
        try:
            memory = tuple(parse_bytes(size) for size in sizes.split(","))
        except ValueError as error:
            raise ValueError(f"{error}; type {endpoint}=24GiB, one size per device") from None
        if 0 in memory:
            raise ValueError(f"`{text}`: a device without memory; type {endpoint}=24GiB, one size per device")
    return RpcAddress(endpoint=f"{address}:{int(port)}", memory_bytes=memory)
