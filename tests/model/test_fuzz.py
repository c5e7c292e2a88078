import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_broken_files_give_model_errors_within_time_and_memory() -> None:
    """In a child, which the address-space limit is for. `make proof-model-fuzz` runs 10,000 cases."""
    command = [sys.executable, "-m", "tests.model.fuzz", "--cases", "2500", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    assert outcomes["refused"] > outcomes["accepted"] > 0
