"""The machine on one screen: evidence as lines of plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.functional import Collective, Functional, Outcome, bus_rate, slowest_link
from llamarack.hardware.machine import Card, Link, LinkKind
from llamarack.units import MIB, format_bytes, format_duration, format_rate

# As `nvidia-smi topo -m` abbreviates them, of the kinds that fall together here the better known name.
_SHORT = {LinkKind.PCIE_SWITCH: "PIX", LinkKind.PCIE_HOST: "PHB", LinkKind.CROSS_SOCKET: "SYS"}
_MATRIX_CARDS = 16
_CARDS_IN_FULL = 4  # more would push the findings off the screen; --json has everything


def summary_lines(evidence: Evidence) -> Iterator[str]:
    host = evidence.machine.host
    available, total = format_bytes(host.memory_available_bytes), format_bytes(host.memory_total_bytes)
    nodes = f", {host.numa_nodes} NUMA nodes" if host.numa_nodes > 1 else ""
    processor = f"{host.processor or 'processor not known'}, {host.cores_usable} cores usable"
    yield _row("host", f"{processor}, {available} of {total} memory available{nodes}")
    if host.instruction_sets:
        yield _row("", f"{' '.join(host.instruction_sets)}; kernel {host.kernel or '–'}")
    if host.memory_bandwidth_bytes_per_s is not None:
        yield _row("", f"memory is read at {host.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s by all cores")
    yield from _card_lines(evidence)
    for build in evidence.builds:
        devices = ", ".join(build.gpu_devices or ()) or ("processor only" if build.gpu_devices == () else None)
        built = devices or {None: "CUDA not known", "none": "processor only"}.get(build.cuda, f"CUDA {build.cuda}")
        yield _row("engine", f"{build.engine} {build.version or ''} ({built}) {build.interpreter}")
    for disk in evidence.disks:
        cached = "–" if disk.cached_fraction is None else f"{disk.cached_fraction:.0%}"
        speed = format_rate(None if disk.read_bytes_per_s is None else disk.read_bytes_per_s / MIB, "MiB/s")
        speed += "" if disk.read_direct else " (through the page cache)"
        rest = f"{cached} in memory, {format_duration(disk.predicted_read_s)} to read the rest"
        yield _row("disk", f"{disk.path}: {format_bytes(disk.size_bytes)} on {disk.file_system}, {speed}, {rest}")
    if evidence.functional is not None:
        yield from _functional_lines(evidence, evidence.functional)


def _card_lines(evidence: Evidence) -> Iterator[str]:
    cards = evidence.machine.cards
    for card in cards:
        capability = ".".join(map(str, card.compute_capability)) if card.compute_capability else "–"
        facts = [
            f"{format_bytes(card.memory_free_bytes)} of {format_bytes(card.memory_total_bytes)} free",
            f"compute {capability}",
            f"PCIe {_or_dash(card.pcie_generation_max)} x{_or_dash(card.pcie_width)}",
            f"NUMA {_or_dash(card.numa_node)}",
        ]
        facts += [f"{card.power_limit_watts:g} W"] if card.power_limit_watts is not None else []
        facts += [f"ECC {'on' if card.ecc_enabled else 'off'}"] if card.ecc_enabled is not None else []
        yield _row(f"card {card.index}", f"{card.name}, {', '.join(facts)}")
        if len(cards) <= _CARDS_IN_FULL:
            yield _row("", f"{card.uuid or 'no UUID'}  {card.pci_bus_id or ''}")
    if cards:
        yield _row(
            "driver", f"{evidence.machine.driver_version or '–'}, up to CUDA {evidence.machine.cuda_version or '–'}"
        )
    if 1 < len(cards) <= _MATRIX_CARDS:
        yield _row("links", "   " + "".join(f"{card.index:>6}" for card in cards))
        for card in cards:
            yield _row("", f"{card.index:>3}" + "".join(f"{_cell(card, peer):>6}" for peer in cards))


def _cell(card: Card, peer: Card) -> str:
    if card is peer:
        return "X"
    link: Link | None = next((link for link in card.links if link.peer_index == peer.index), None)
    if link is None:
        return "–"
    return f"NV{link.lanes}" if link.kind is LinkKind.NVLINK else _SHORT[link.kind]


def _functional_lines(evidence: Evidence, functional: Functional) -> Iterator[str]:
    if functional.context_bytes:
        sizes = sorted({f"{size / MIB:.0f} MiB" for size in functional.context_bytes.values()})
        yield _row("context", f"a bare CUDA context takes {' or '.join(sizes)} of a card")
    for direct, way in ((True, "directly"), (False, "through host memory")):
        pairs = [pair for pair in functional.pairs if pair.direct is direct]
        good = [pair for pair in pairs if pair.outcome is Outcome.OK]
        rates = [pair.bandwidth_bytes_per_s for pair in good if pair.bandwidth_bytes_per_s is not None]
        if pairs:
            slowest = f", slowest {min(rates) / 1e9:.1f} GB/s" if rates else ""
            yield _row("copies", f"{len(good)} of {len(pairs)} copies between cards arrived {way}{slowest}")
    if functional.collective is not None:
        yield from _collective_lines(functional.collective, slowest_link(evidence.machine.cards))


def _collective_lines(collective: Collective, link: Link | None) -> Iterator[str]:
    if collective.outcome is Outcome.OK:
        right = collective.world - len(collective.matrix_wrong_ranks)
        yield _row("compute", f"matrix product right on {right} of {collective.world}")
    times = [f"{format_bytes(one.size_bytes)} {format_duration(one.seconds)}" for one in collective.reduces]
    said = f"{collective.outcome.value}, {collective.world} ranks ({collective.backend})"
    yield _row("all-reduce", ": ".join(filter(None, (said, ", ".join(times)))))
    if times and link is not None and link.bandwidth_bytes_per_s and collective.backend == "nccl":
        rate = bus_rate(collective.reduces[-1], collective.world)
        share = rate / link.bandwidth_bytes_per_s
        yield _row("", f"{rate / 1e9:.0f} GB/s over the slowest link, {share:.0%} of its nominal rate")


def _row(name: str, text: str) -> str:
    return f"{name:<11}{text}"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
