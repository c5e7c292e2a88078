"""Which faults lie around the engines: variables, device nodes, limits, ports, others? Pure rules, one fault each."""

from __future__ import annotations

from collections.abc import Iterator

from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.visible import Fault, visible_cards
from llamarack.units import GIB, MIB, format_bytes

# A rule of thumb of people who run such servers, not measured here: with fewer, containers missed their start deadline.
_CORES_FOR_LOADING = 8
# Docker gives 64 MiB. NCCL's ranks exchange through it wherever cards have no direct path (NCCL user guide,
# "Shared memory"); vLLM asks for more because PyTorch workers pass tensors through it.
_SHM_DEFAULT_BYTES = 64 * MIB
_SHM_ENOUGH_BYTES = 1 * GIB
_OPEN_FILES = 4096  # a stream holds two descriptors, one to the client and one to the engine: 2,000 streams

_VISIBLE_FAULTS = {
    Fault.EMPTY: "it is set to nothing, so CUDA shows no card",
    Fault.NONE: "-1 hides every card",
    Fault.OUT_OF_RANGE: "there is no such card; CUDA drops it and everything after it, without a word",
    Fault.TWICE: "the same card is named twice; CUDA then refuses the list",
    Fault.UNKNOWN_UUID: "no card has this UUID; CUDA drops it and everything after it, without a word",
    Fault.AMBIGUOUS_UUID: "this beginning fits several cards",
    Fault.NOT_A_CARD: "this is neither an index nor a UUID; CUDA drops it and everything after it",
    Fault.SEVERAL_SLICES: "a process sees one MIG slice only, the first",
    Fault.MIG_BY_INDEX: "this card is cut into MIG slices, and a slice is named by its UUID",
    Fault.MIXED: "indices and UUIDs are mixed",
}


def visible_devices(evidence: Evidence) -> Iterator[Finding]:
    value = _variable(evidence, "CUDA_VISIBLE_DEVICES")
    if value is None or not evidence.machine.cards:
        return
    visible = visible_cards(value, evidence.machine.cards)
    if visible.fault is None:
        return
    everything = ",".join(card.uuid or str(card.index) for card in evidence.machine.cards)
    yield Finding(
        code=f"visible_devices_{visible.fault.value}",
        severity=Severity.WARNING if visible.fault in (Fault.NONE, Fault.MIXED) else Severity.ERROR,
        subject="CUDA_VISIBLE_DEVICES",
        seen=f"CUDA_VISIBLE_DEVICES={value!r}: at `{visible.entry}` {_VISIBLE_FAULTS[visible.fault]}",
        why=f"programs started from this shell see {len(visible.cards)} of {len(evidence.machine.cards)} cards",
        fix=f"unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES={everything}",
    )


def device_order(evidence: Evidence) -> Iterator[Finding]:
    """CUDA's own order is fastest first: with unlike cards an index means another card there than in nvidia-smi."""
    order = _variable(evidence, "CUDA_DEVICE_ORDER")
    names = {card.name for card in evidence.machine.cards}
    if evidence.environment is not None and len(names) > 1 and order != "PCI_BUS_ID":
        yield Finding(
            code="device_order",
            severity=Severity.WARNING,
            subject="CUDA_DEVICE_ORDER",
            seen=f"unlike cards and CUDA_DEVICE_ORDER={order or 'not set'}",
            why="CUDA counts the fastest card first, nvidia-smi by PCI bus: index 0 is not the same card in both",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID (llamarack sets it for its own engines)",
        )


def device_nodes(evidence: Evidence) -> Iterator[Finding]:
    nodes = dict(evidence.environment.device_nodes) if evidence.environment else {}
    if evidence.functional is not None and evidence.functional.context_bytes:
        nodes.pop("nvidia-uvm", None)  # made by the driver's own helper when CUDA first starts, and CUDA did start
    in_container = evidence.environment is not None and evidence.environment.in_container
    fixes = {
        "missing": "start the container with --gpus all, or --device for each node"
        if in_container
        else "sudo nvidia-modprobe -c 0 -u makes the nodes",
        "denied": "start the container anew; so that it lasts, give every node by name: --device /dev/nvidia0 "
        "--device /dev/nvidiactl --device /dev/nvidia-uvm",
        "no permission": "sudo usermod -aG video,render $USER, then log in again",
    }
    reasons = {
        "missing": "the driver has it and this environment does not, so CUDA cannot open the card",
        "denied": "the container lost its cards: `systemctl daemon-reload` on the host rewrote its device rules",
        "no permission": "this user may not open it",
    }
    for state in sorted(set(nodes.values()) - {"ok"}):
        names = [f"/dev/{name}" for name, found in nodes.items() if found == state]
        yield Finding(
            code=f"device_{state.replace(' ', '_')}" if state in fixes else "device_unreadable",
            severity=Severity.ERROR,
            subject=", ".join(names),
            seen=f"device node: {state}",
            why=reasons.get(state, "CUDA opens it and will fail the same way"),
            fix=fixes.get(state, f"ls -l {names[0]}; sudo dmesg | grep -i nvrm"),
        )


def shared_memory(evidence: Evidence) -> Iterator[Finding]:
    total = evidence.environment.shm_total_bytes if evidence.environment else None
    if total is None or total >= _SHM_ENOUGH_BYTES or len(evidence.machine.cards) < 2:
        return
    yield Finding(
        code="shm_small",
        severity=Severity.ERROR if total <= _SHM_DEFAULT_BYTES else Severity.WARNING,
        subject="/dev/shm",
        seen=f"{format_bytes(total)}",
        why="ranks of one model exchange data through it: too small, and the start ends in a bus error or hangs",
        fix="docker run --shm-size=10g, or --ipc=host; without a container: sudo mount -o remount,size=10g /dev/shm",
    )


def limits(evidence: Evidence) -> Iterator[Finding]:
    environment = evidence.environment
    if environment is None:
        return
    if environment.open_files < _OPEN_FILES:
        can_raise = environment.open_files_hard >= _OPEN_FILES
        yield Finding(
            code="open_files",
            severity=Severity.NOTE if can_raise else Severity.WARNING,
            subject="open files",
            seen=f"at most {environment.open_files:g}, hard limit {environment.open_files_hard:g}",
            why="each stream holds two; at the limit new clients are refused",
            fix="ulimit -n 65536"
            if can_raise
            else "LimitNOFILE=65536 in the systemd unit, --ulimit nofile=65536 in docker",
        )
    if evidence.wanted.locks_memory and environment.memlock_bytes < evidence.machine.host.memory_total_bytes:
        yield Finding(
            code="memlock",
            severity=Severity.WARNING,
            subject="locked memory",
            seen=f"at most {format_bytes(environment.memlock_bytes)}, and the file asks the engine to lock the model",
            why="the lock fails, the engine only warns, and the model can be swapped out",
            fix="LimitMEMLOCK=infinity in the systemd unit, --ulimit memlock=-1 in docker, or leave mlock out",
        )


def processor(evidence: Evidence) -> Iterator[Finding]:
    cores = evidence.machine.host.cores_usable
    if evidence.machine.cards and cores < _CORES_FOR_LOADING:
        yield Finding(
            code="few_cores",
            severity=Severity.WARNING,
            subject="processor",
            seen=f"{cores} cores may be used here (affinity and cgroup), {_CORES_FOR_LOADING} are wanted",
            why="loading and tokenising become the bottleneck: cards wait, and starts run into their deadline",
            fix=f"docker run --cpus={_CORES_FOR_LOADING}; CPUQuota= in systemd; resources.limits.cpu in Kubernetes",
        )


def numa(evidence: Evidence) -> Iterator[Finding]:
    usable = evidence.environment.numa_nodes_usable if evidence.environment else ()
    far = [card for card in evidence.machine.cards if card.numa_node is not None and card.numa_node not in usable]
    if usable and far:
        nodes = sorted({card.numa_node for card in far if card.numa_node is not None})
        yield Finding(
            code="numa_far",
            severity=Severity.WARNING,
            subject="cards " + ", ".join(str(card.index) for card in far),
            seen=f"they hang on NUMA node {', '.join(map(str, nodes))}; this process may use node "
            f"{', '.join(map(str, usable))}",
            why="every transfer crosses the processor interconnect",
            fix=f"numactl --cpunodebind={nodes[0]} --membind={nodes[0]}, or docker run --cpuset-cpus with its cores",
        )


def misleading_variables(evidence: Evidence) -> Iterator[Finding]:
    value = _variable(evidence, "GGML_CUDA_P2P")
    if value in ("0", "false", "off", "no", ""):
        yield Finding(
            code="p2p_variable_on",
            severity=Severity.WARNING,
            subject="GGML_CUDA_P2P",
            seen=f"GGML_CUDA_P2P={value}",
            why="llama.cpp only looks whether it is set: this value turns direct copies on",
            fix="unset GGML_CUDA_P2P",
        )


def running_engines(evidence: Evidence) -> Iterator[Finding]:
    for engine in evidence.environment.engines if evidence.environment else ():
        yield Finding(
            code="engine_running",
            severity=Severity.NOTE,
            subject=f"{engine.engine}, process {engine.pid}",
            seen=f"it runs already, user {engine.user or 'not visible'}",
            why="it can take memory and computing time when nobody expects it; two loads at once mis-measure memory",
            fix=f"ps -fp {engine.pid}; stop it if it is not meant to share these cards",
        )


def ports(evidence: Evidence) -> Iterator[Finding]:
    for taken in evidence.taken_ports:
        yield Finding(
            code="port_taken",
            severity=Severity.ERROR,
            subject=f"{taken.host}:{taken.port}",
            seen=taken.reason,
            why="the gateway cannot listen there",
            fix=f"ss -ltnp 'sport = :{taken.port}' names the holder; or set another gateway.port",
        )


def unanswered(evidence: Evidence) -> Iterator[Finding]:
    for look in evidence.unanswered:
        yield Finding(
            code="no_answer" if look.hung else "not_readable",
            severity=Severity.ERROR if look.hung else Severity.WARNING,
            subject=look.subject,
            seen=look.detail,
            why="it could not be judged" + ("; an engine would hang at the same place" if look.hung else ""),
            fix=f"ls -l {look.subject}; and whether the disk or server behind it is up: mount, df, dmesg",
        )


def _variable(evidence: Evidence, name: str) -> str | None:
    return evidence.environment.variables.get(name) if evidence.environment else None


RULES = (
    visible_devices,
    device_order,
    device_nodes,
    shared_memory,
    limits,
    processor,
    numa,
    misleading_variables,
    running_engines,
    ports,
    unanswered,
)
