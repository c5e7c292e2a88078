"""The Grafana dashboard and the alert rules ask for metrics that exist, and promtool agrees with the rules."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from llamarack.gateway.metrics import Metrics
from llamarack.gateway.rack_metrics import rack_text
from tests.browser.records import GIB, replica, status

ROOT = Path(__file__).parents[1]
RULES = ROOT / "examples" / "prometheus"


def _known() -> dict[str, set[str]]:
    """Every sample name of ours and the labels it may carry."""
    metrics = Metrics()
    known: dict[str, set[str]] = {"up": {"job"}}
    for collector in vars(metrics).values():
        names = getattr(collector, "_labelnames", None)
        if names is not None:
            name = collector._name
            for suffix in ("", "_total", "_bucket", "_sum", "_count"):
                known[name + suffix] = {*names, "le"} if suffix == "_bucket" else set(names)
    for family in text_string_to_metric_families(rack_text(status(), supervisor_answers=True)):
        for sample in family.samples:
            known[sample.name] = set(sample.labels)
    return known


def _expressions() -> list[str]:
    rules = yaml.safe_load((RULES / "llamarack.rules.yml").read_text())
    board = json.loads((ROOT / "examples" / "grafana" / "llamarack.json").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    found += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found


def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    known = _known()
    asked = 0
    for expression in _expressions():
        for name, labels in re.findall(r"\b(llamarack_\w+|up)\b(\{[^}]*\})?", expression):
            assert name in known, f"{name} in {expression}"
            used = set(re.findall(r"(\w+)\s*=~?", labels))
            assert used <= known[name] | {"instance", "job"}, expression
            asked += 1
    assert asked > 40


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    board = json.loads((ROOT / "examples" / "grafana" / "llamarack.json").read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & own, panel["title"]
        assert place["x"] + place["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"]
        cells |= own
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_rack_text_tells_what_the_record_tells_and_nothing_of_what_is_unknown() -> None:
    dead = replica(1, state="backoff", pid=None, restarts=3)
    record = status(models=[{"name": "m", "replicas": [replica(0), dead]}])
    record["cards"][1]["power_w"] = None
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(rack_text(record, supervisor_answers=True)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    assert found["llamarack_supervisor_up"] == [({}, 1.0)]
    restarts = {labels["replica"]: value for labels, value in found["llamarack_replica_restarts_total"]}
    assert restarts == {"llama2-13b-chat-0": 0, "llama2-13b-chat-1": 3}
    assert [labels["state"] for labels, _ in found["llamarack_replica_state"]] == ["ready", "backoff"]
    ((labels, held),) = found["llamarack_replica_held_bytes"]  # the dead one holds nothing that is known
    assert labels["replica"] == "llama2-13b-chat-0"
    assert held == pytest.approx(68.5 * GIB * 1.004, rel=1e-6)
    assert [labels["card"] for labels, _ in found["llamarack_card_power_w"]] == ["0"]
    assert "llamarack_replica" not in rack_text(None, supervisor_answers=False)
    assert "llamarack_supervisor_up 0.0" in rack_text(None, supervisor_answers=False)


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [("check", "rules", "llamarack.rules.yml"), ("check", "config", "prometheus.yml"),
     ("test", "rules", "llamarack.rules.test.yml")],
)  # fmt: skip
def test_promtool_accepts_the_rules_and_they_fire_when_they_should(words: tuple[str, ...]) -> None:
    promtool = os.environ.get("LLAMARACK_PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install --no-install-recommends prometheus, or set LLAMARACK_PROMTOOL")
    done = subprocess.run([promtool, *words], cwd=RULES, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_rules_that_are_tested_are_all_the_rules() -> None:
    rules = yaml.safe_load((RULES / "llamarack.rules.yml").read_text())
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    tested = (RULES / "llamarack.rules.test.yml").read_text()
    assert {name for name in names if name not in tested} == set()
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["action"]
