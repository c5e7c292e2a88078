"""`acceptance` on the real engine, as a user types it: every step, one report, what was proved is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamarack import config
from llamarack.cli.status import proofs_record
from llamarack.errors import ModelError
from llamarack.judge.proofs import read_proofs
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir, rack_paths
from llamarack.supervise.effective import deployment_sha256

pytestmark = pytest.mark.llamacpp
DEADLINE_S = 600.0
SMALL = ["--questions", "1", "--answer-tokens", "8", "--concurrency", "1", "--requests", "5", "--repeat", "3"]
SMALL += ["--input-tokens", "48", "--output-tokens", "4", "--prompts", "business-en", "--no-functional"]


def test_acceptance_does_every_step_and_remembers_what_it_proved(tmp_path: Path) -> None:
    try:
        model = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    file = tmp_path / "rack.yaml"
    limits = "{context_tokens: 512, sequences: 2, threads: 1}"
    file.write_text(f"models:\n  - name: demo\n    path: {model}\n    gpus: []\n    limits: {limits}\n")
    environment = {
        **os.environ,
        "LLAMARACK_STATE_DIR": str(tmp_path / "state"),
        "LLAMARACK_LOAD_LOCK": str(tmp_path / "l"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", "acceptance", str(file), *SMALL, "--json", "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )
    record = json.loads(done.stdout)
    outcomes = {step["name"]: step["outcome"] for step in record["steps"]}
    assert list(outcomes) == ["check", "serve", "verify", "bench", "compare"], done.stderr
    assert (outcomes["serve"], outcomes["verify"], outcomes["compare"]) == ("PASSED", "PASSED", "SKIPPED"), done.stderr
    assert outcomes["bench"] in {"PASSED", "INCONCLUSIVE"}  # a busy machine makes no valid run
    assert done.returncode == {"GO": 0, "NO-GO": 6, "INCONCLUSIVE": 7}[record["verdict"]]
    out = tmp_path / "out"
    for page in (
        "report.html",
        "report.md",
        "junit.xml",
        "verify/report.html",
        "bench/report.html",
        "bench/facts.json",
    ):
        assert (out / page).exists(), page
    # What runs now was proved; with other settings it is not.
    paths = rack_paths("rack", tmp_path / "state")
    deployment = config.load(file).deployment
    assert read_proofs(paths)["verify"].deployment_sha256 == deployment_sha256(deployment)
    assert all(proof["is_current"] for proof in proofs_record(paths, deployment_sha256(deployment)))
    file.write_text(file.read_text().replace("sequences: 2", "sequences: 3"))
    changed = deployment_sha256(config.load(file).deployment)
    assert not any(proof["is_current"] for proof in proofs_record(paths, changed))
