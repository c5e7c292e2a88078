"""What the supervisor knows, in Prometheus form: states, restarts, memory planned and held, cards. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def rack_text(record: Mapping[str, Any] | None, *, supervisor_answers: bool) -> str:
    """The exposition of a status record; without one only that there is none. What is unknown has no sample."""
    registry = CollectorRegistry()
    registry.register(_Record(record or {}, supervisor_answers))
    return generate_latest(registry).decode()


class _Record(Collector):
    def __init__(self, record: Mapping[str, Any], supervisor_answers: bool) -> None:
        self._record = record
        self._supervisor_answers = supervisor_answers

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("llamarack_supervisor_up", "1 while the supervisor answers the gateway")
        up.add_metric([], float(self._supervisor_answers))
        yield up
        yield from self._replicas()
        yield from self._cards()

    def _replicas(self) -> Iterator[Metric]:
        labels = ["model", "replica"]
        restarts = CounterMetricFamily("llamarack_replica_restarts", "Starts after the first", labels=labels)
        state = GaugeMetricFamily("llamarack_replica_state", "1 for the state it is in", labels=[*labels, "state"])
        planned = GaugeMetricFamily("llamarack_replica_planned_bytes", "Memory as planned", labels=labels)
        held = GaugeMetricFamily(
            "llamarack_replica_held_bytes", "Memory it took on its cards, or resident on the processor", labels=labels
        )
        for model in self._record.get("models", []):
            for replica in model["replicas"]:
                who = [model["name"], replica["id"]]
                restarts.add_metric(who, replica["restarts"])
                state.add_metric([*who, replica["state"]], 1)
                planned.add_metric(who, replica["predicted"]["total_bytes"])
                actual = replica["actual"]
                taken = sum(actual["card_held_bytes"].values()) or actual["resident_bytes"]
                if replica["pid"] and taken is not None:
                    held.add_metric(who, taken)
        yield from (family for family in (restarts, state, planned, held) if family.samples)

    def _cards(self) -> Iterator[Metric]:
        families = {
            "memory_total_bytes": "Memory of the card",
            "memory_used_bytes": "Memory in use, by anybody",
            "utilisation_fraction": "Share of time that a kernel ran",
            "power_w": "Power drawn",
            "temperature_c": "Temperature",
            "ecc_uncorrected": "Memory errors that were not corrected, since the driver was loaded",
        }
        for key, text in families.items():
            family = GaugeMetricFamily(f"llamarack_card_{key}", text, labels=["card", "name", "uuid"])
            for card in self._record.get("cards") or []:
                if card.get(key) is not None:
                    family.add_metric([str(card["index"]), card["name"], card.get("uuid") or ""], card[key])
            if family.samples:
                yield family
