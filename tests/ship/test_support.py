"""Secrets and prompts are planted wherever a site may have them; none is in the archive, and what is needed is."""

import errno
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from llamarack.errors import UsageError
from llamarack.paths import rack_paths
from llamarack.ship import support
from llamarack.ship.mask import Mask, is_secret_name

# One word each, so that a piece of it anywhere is found.
PLANTED = {
    "environment": "envtokenZq81kd",
    "index": "indexpassZq82kd",
    "proxy": "proxypassZq83kd",
    "file env": "fileenvZq84kd",
    "file engine_args": "filearg-Zq85kd",
    "file webhook": "T00/B00/hookZq86kd",
    "file comment": "commentZq87kd",
    "engine key": "enginekeyZq88kd-0123456789abcdef",
    "gateway key": "lr-Zq89kdAAAABBBBCCCCDDDDEEEEFFFFGGGGHHHHIII",
    "log bearer": "bearerZq90kd",
    "log option": "optionZq91kd",
    "log url": "urlpassZq92kd",
    "log jwt": "eyJhbGciOi.eyJzdWIZq93kd.c2ln",
    "log hugging face": "hf_Zq94kdAbCdEfGh",
    "journal": "journalZq95kd",
    "journal argv": "argvZq03kd",
    "prompt in vllm's log": "mergerZq96kd",
    "prompt as raw lines": "rashZq97kd",
    "prompt in an exception": "divorceZq98kd",
    "prompt in Chinese": "收购计划",
    "prompt in json": "salaryZq99kd",
    "prompt in the journal": "layoffsZq00kd",
    "answer": "answerZq01kd",
    "pem": "MIIEpemZq02kd",
}

LOG = f"""\
INFO 11-30 12:00:00 [api_server.py:1] vLLM API server version 0.33.0
INFO 11-30 12:00:00 [logger.py:40] Received request c-1: prompt: 'the {PLANTED["prompt in vllm's log"]} is', params: x
(EngineCore_DP0 pid=12) INFO 11-30 12:00:01 [core.py:58] Initializing engine with config: model='/data/m'
Dear doctor, my {PLANTED["prompt as raw lines"]} itches
slot launch_slot_: id  0 | task 1 | processing task
srv  update: {PLANTED["prompt in Chinese"]}，请帮忙
{{"messages": [{{"role": "user", "content": "{PLANTED["prompt in json"]}"}}]}}
srv  log_server_r: response: {{"content": "{PLANTED["answer"]}"}}
Traceback (most recent call last):
  File "/opt/x.py", line 3, in go
ValueError: cannot encode "about my {PLANTED["prompt in an exception"]}"
INFO 11-30 12:00:02 [x.py:1] Authorization: Bearer {PLANTED["log bearer"]}
INFO 11-30 12:00:02 [x.py:1] args: --api-key {PLANTED["log option"]} --port 1
INFO 11-30 12:00:02 [x.py:1] proxy http://corp:{PLANTED["log url"]}@proxy:3128/
INFO 11-30 12:00:02 [x.py:1] seen {PLANTED["log jwt"]} and {PLANTED["log hugging face"]} and {PLANTED["gateway key"]}
INFO 11-30 12:00:03 [x.py:1] seen again: {PLANTED["journal argv"]}
INFO 11-30 12:00:03 [x.py:1] env {PLANTED["environment"]} {PLANTED["file env"]} {PLANTED["engine key"]}
-----BEGIN PRIVATE KEY-----
{PLANTED["pem"]}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""

FILE = f"""\
schema_version: 1
# password: {PLANTED["file comment"]}
models:
  - name: m
    path: m.gguf
    env: {{LM_SETTING: {PLANTED["file env"]}}}
    engine_args: {{api-key: {PLANTED["file engine_args"]}}}
supervise: {{webhook: "https://hooks.corp/services/{PLANTED["file webhook"]}"}}
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """A rack's state with something planted in every file; the environment to call the command with."""
    rack = rack_paths("site", tmp_path / "state")
    rack.logs.mkdir(parents=True)
    (rack.logs / "m-0.log").write_text(LOG)
    (rack.logs / "gateway-0.log.1").write_text(LOG)
    death = {"message": f'died after "{PLANTED["answer"]} so"', "log_tail": LOG.splitlines(), "cause": "cuda_oom"}
    replica = {"id": "m-0", "endpoint": {"key": PLANTED["engine key"], "socket": "/x.sock"}, "last_death": death}
    rack.state.write_text(json.dumps({"schema_version": 1, "replicas": [replica]}))
    entries = [
        {"kind": "died", "message": f"token={PLANTED['journal']}", "data": {"password": PLANTED["journal"]}},
        {"kind": "starting", "message": "x", "data": {"argv": ["vllm", "--hf-token", PLANTED["journal argv"], "--x"]}},
        {"kind": "died", "message": "boom", "data": {"log_tail": [f"{PLANTED['prompt in the journal']} please"]}},
    ]
    rack.events.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + f'{{"kind": "{PLANTED["journal"]}')
    (tmp_path / "rack.yaml").write_text(FILE)
    return {
        **{name: value for name, value in os.environ.items() if name not in {"PIP_CERT"}},
        "LLAMARACK_STATE_DIR": str(tmp_path / "state"),
        "CORP_API_TOKEN": PLANTED["environment"],
        "VLLM_NOTE": f"see {PLANTED['environment']}",
        "PIP_INDEX_URL": f"https://bot:{PLANTED['index']}@index.corp/simple",
        "HTTPS_PROXY": f"http://bot:{PLANTED['proxy']}@proxy.corp:3128",
        "HOME": "/home/alicezq",
    }


def _archive(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            entry.name.removeprefix("llamarack-support/"): archive.extractfile(entry).read().decode()  # type: ignore[union-attr]
            for entry in archive.getmembers()
        }


def _support(tmp_path: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamarack", "support", "-o", str(tmp_path / "s.tar.gz"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


@pytest.mark.process
def test_no_planted_secret_or_prompt_is_in_the_archive(tmp_path: Path, site: dict[str, str]) -> None:
    done = _support(tmp_path, site, str(tmp_path / "rack.yaml"), "--mask-names")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s.tar.gz").stat().st_mode & 0o777 == 0o600
    parts = _archive(tmp_path / "s.tar.gz")
    everything = "\n".join(parts.values())
    assert [what for what, value in PLANTED.items() if value in everything] == []
    assert re.findall(r"Zq\d\dkd", everything) == []  # nor a piece of one
    assert "alicezq" not in everything

    # What a report needs is still there.
    log = parts["racks/site/logs/m-0.log"]
    for kept in (
        "vLLM API server version 0.33.0",
        "model='/data/m'",
        'File "/opt/x.py", line 3, in go',
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "slot launch_slot_: id  0 | task 1 | processing task",
    ):
        assert kept in log
    state = json.loads(parts["racks/site/state.json"])
    assert state["replicas"][0]["last_death"]["cause"] == "cuda_oom"
    assert {"check.json", "versions.json", "engines.json", "environment.json", "deployment.yaml"} <= set(parts)
    manifest = json.loads(parts["manifest.json"])
    # No rack runs and the model is not there: said, not silently left out.
    assert "racks/site/status.json" in manifest["not_collected"]
    assert "`models[0].path`" in manifest["not_collected"]["check.json of the file"]
    assert manifest["masked"]["named"] > 0
    assert _support(tmp_path, site).returncode == 2  # does not overwrite


def test_names_of_secrets_are_told_from_counts_of_tokens() -> None:
    for name in ("api_key", "API_KEY", "HF_TOKEN", "hfToken", "db-password", "Authorization", "key", "SESSION_COOKIE"):
        assert is_secret_name(name), name
    for name in ("max_tokens", "context_tokens", "bos_token_id", "tokens_per_s", "api_keys_file", "tokenizer", "PWD",
                 "keep_alive_s", "monkey", "output_tokens"):  # fmt: skip
        assert not is_secret_name(name), name


def test_what_tells_something_is_left_alone() -> None:
    mask = Mask([])
    for text in (
        "GPU-1f2e3d4c-aaaa-bbbb-cccc-1234567890ab",
        "/data/models/llama-2-13b-chat.Q8_0.gguf",
        "max_tokens: 512, n_ctx = 4096",
        "print_info: BOS token             = 1 '<|im_start|>'",
        "xllamacpp-2026.10.11549-cp310-abi3-manylinux2014_x86_64",
        "gateway: {api_keys_file: /etc/keys.yaml}",
        "NVIDIA H200 143771 MiB driver 580.95.05",
    ):
        assert mask.text(text) == text
    assert not mask.counts


def test_lines_that_serve_writes_are_kept_in_both_forms() -> None:
    mask = Mask(["hunter22"])
    shown = '12:00:00 ✗ m-0 CUDA out of memory (while loading)\n12:00:01 · m-0 said "my own words"\n'
    assert mask.log(shown) == shown.replace("my own words", "<masked text>")
    line = '{"time_unix_s":1.5,"kind":"died","message":"token hunter22","data":{"log_tail":["my own words"]}}'
    assert json.loads(mask.log(line)) == {
        "time_unix_s": 1.5,
        "kind": "died",
        "message": "token <masked known>",
        "data": {"log_tail": ["<line of 12 characters>"]},
    }
    assert mask.log(line[:-9]) == f"<line of {len(line) - 9} characters>\n"


def test_known_value_goes_wherever_it_stands_and_the_longest_first() -> None:
    mask = Mask(["hunter22", "hunter22-long"])
    assert mask.text("a=hunter22-long b=xhunter22y") == "a=<masked known> b=x<masked known>y"


def test_archive_that_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half archive would be "there already" for the next attempt."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(support, "collect", lambda *_: support.Collected(parts={"a.txt": b"a"}))
    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    path = tmp_path / "support.tar.gz"
    with pytest.raises(UsageError, match="No space left"):
        support.write_support(path, support.Asked(file=None, racks=(), is_masking_names=False), print)
    assert not path.exists()


def test_fault_of_our_own_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARACK_STATE_DIR", str(tmp_path))
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "1-2.json").write_text('{"traceback": ["KeyError: \'x\'"]}')
    monkeypatch.setattr(support, "_ask", lambda words: {})
    found = support.collect(support.Asked(file=None, racks=(), is_masking_names=False), Mask(()), print)
    assert b"KeyError" in found.parts["faults/1-2.json"]
