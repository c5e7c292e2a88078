"""`llamarack verify` as a user types it: files in, exit code and record out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEADLINE_S = 900.0  # two racks of a real engine on a machine that does other things
QUESTIONS = (
    {"id": "en", "language": "en", "prompt": "Explain to a sales team what a force majeure clause is."},
    {"id": "zh", "language": "zh", "prompt": "请解释什么是不可抗力条款。"},
)
# One thread: two spin against whatever else runs on a small machine.
LIMITS: Mapping[str, Any] = {"context_tokens": 512, "sequences": 4, "threads": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """`record`: what `--json` printed."""

    exit_code: int
    record: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        return str(self.record["verdict"])

    @property
    def cause_codes(self) -> list[str]:
        return [cause["code"] for cause in self.record["causes"]]

    @property
    def evidence(self) -> str:
        return " ".join(cause["evidence"] for cause in self.record["causes"])

    @property
    def numbers(self) -> str:
        """For the message of a test that fails, and for the table in docs/verify-and-compare.md."""
        names = ("positions", "agreement", "ties", "real", "kl_mean", "logprob_error_p99", "logprob_error_max")
        rows = [
            f"{one['factor']}: " + ", ".join(f"{n} {one['stats'][n]}" for n in names) for one in self.record["drift"]
        ]
        return "\n".join(
            [f"{self.verdict} {self.cause_codes} {self.record['shape']}", f"free: {self.record['free_run']}", *rows]
        )


def write_questions(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in QUESTIONS))
    return path


def write_rack(folder: Path, name: str, path: Path, **settings: Any) -> Path:
    """A deployment file of one model on the processor; `settings` are laid over the model's."""
    model = {"name": name, "path": str(path), "gpus": [], "limits": dict(LIMITS)} | settings
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"models": [model], "gateway": {"port": 0}}))
    return file


def run_verify(
    folder: Path,
    reference: Path,
    candidate: Path | None,
    *,
    output: Path,
    load_streams: int = 0,
    restart: bool = True,
    output_tokens: int = 16,
) -> Verified | None:
    """None without a candidate. Fails where the command does not end with a verdict."""
    words = ["verify", "--reference", str(reference), "--prompts", str(folder / "questions.jsonl"), "-o", str(output)]
    words += ["--output-tokens", str(output_tokens), "--load-streams", str(load_streams), "--json"]
    words += [] if candidate is None else ["--candidate", str(candidate)]
    words += [] if restart else ["--no-restart"]
    state, lock = folder / "state", folder / "load.lock"
    done = subprocess.run(
        [sys.executable, "-m", "llamarack", *words],
        env=os.environ | {"LLAMARACK_STATE_DIR": str(state), "LLAMARACK_LOAD_LOCK": str(lock)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode in ({0} if candidate is None else {0, 6, 7}), done.stderr
    if candidate is None:
        return None
    verified = Verified(exit_code=done.returncode, record=json.loads(done.stdout))
    print(f"{output.name}: {verified.numbers}")
    assert (output / "report.html").exists()
    return verified


def verify(folder: Path, reference: Path, candidate: Path, name: str, **settings: Any) -> Verified:
    """Kept in `folder/name`."""
    verified = run_verify(folder, reference, candidate, output=folder / name, **settings)
    assert verified is not None
    return verified
