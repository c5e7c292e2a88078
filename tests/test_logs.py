"""Logs are capped, turned over, and JSON where that was asked for."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamarack.errors import ModelError, UsageError
from llamarack.logs import JsonLines, LogFormat, fresh_own_log, log_format, log_max_bytes
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir

_TURNING = """
import os, sys
from llamarack.logs import turn_own_log
for number in range(4000):
    turn_own_log()
    print("line", number, "x" * 90, file=sys.stderr, flush=True)
"""


def test_words_for_form_and_size_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_format() is LogFormat.TEXT
    assert log_max_bytes() == 16 * 1024**2
    monkeypatch.setenv("LLAMARACK_LOG_FORMAT", "json")
    monkeypatch.setenv("LLAMARACK_LOG_MAX_BYTES", "1MiB")
    assert log_format() is LogFormat.JSON
    assert log_max_bytes() == 1024**2
    for name, value, named in (
        ("LLAMARACK_LOG_FORMAT", "yaml", "not text or json"),
        ("LLAMARACK_LOG_MAX_BYTES", "lots", "a size such as"),
        ("LLAMARACK_LOG_MAX_BYTES", "10", "at least 65536"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=named) as caught:
            log_format() if name.endswith("FORMAT") else log_max_bytes()
        assert name in str(caught.value.hint)


def test_json_line_holds_message_and_exception() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info())
    value = json.loads(JsonLines().format(record))
    assert (value["level"], value["logger"], value["message"]) == ("error", "n", "it broke")
    assert "ValueError: bad" in value["exception"]


@pytest.mark.process
def test_own_log_of_a_detached_rack_is_capped_and_turned(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text("the time before")
    with open(fresh_own_log(path), "wb") as output:
        assert (tmp_path / "serve.log.1").read_text() == "the time before"
        environment = {**os.environ, "LLAMARACK_OWN_LOG": str(path), "LLAMARACK_LOG_MAX_BYTES": "128KiB"}
        subprocess.run([sys.executable, "-c", _TURNING], stderr=output, env=environment, check=True, timeout=120)
    assert path.stat().st_size <= 64 * 1024 + 200
    assert (tmp_path / "serve.log.1").stat().st_size <= 64 * 1024 + 200
    lines = (tmp_path / "serve.log.1").read_text().splitlines() + path.read_text().splitlines()
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == list(range(numbers[0], 4000))  # not a line lost between the two parts


@pytest.mark.process
def test_file_that_a_user_redirects_to_is_left_alone(tmp_path: Path) -> None:
    with open(tmp_path / "mine.log", "ab") as output:
        environment = {**os.environ, "LLAMARACK_OWN_LOG": str(tmp_path / "other.log")}
        environment["LLAMARACK_LOG_MAX_BYTES"] = "64KiB"
        subprocess.run([sys.executable, "-c", _TURNING], stderr=output, env=environment, check=True, timeout=120)
    assert len((tmp_path / "mine.log").read_text().splitlines()) == 4000


@pytest.mark.process
def test_reason_of_an_end_is_an_object_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llamarack", "serve", str(tmp_path / "none.yaml"), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["kind"] == "config_invalid"
    assert "none.yaml" in json.loads(line)["message"]


@pytest.mark.llamacpp
def test_rack_with_json_logs_writes_nothing_else(tmp_path: Path) -> None:
    """Events on stderr and the gateway's log: every line is an object; the logs lie where they were asked to."""
    try:
        model = demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    environment = {
        **os.environ,
        "LLAMARACK_LOG_DIR": str(tmp_path / "logs"),
        "LLAMARACK_LOAD_LOCK": str(tmp_path / "lock"),
    }
    serve = [
        sys.executable,
        "-m",
        "llamarack",
        "serve",
        str(model),
        "--port",
        "0",
        "--log-format",
        "json",
    ]
    with subprocess.Popen(
        [*serve, "--state-dir", str(tmp_path / "state")], env=environment, stderr=subprocess.PIPE, text=True
    ) as rack:
        assert rack.stderr is not None
        kinds = []
        for line in rack.stderr:
            kinds.append(json.loads(line)["kind"])
            if kinds[-1] in {"ready", "failed"}:
                rack.terminate()
        assert rack.wait(120) == 143
    assert "ready" in kinds  # or the reason, as an object too
    assert kinds[-1] == "rack_stopped"
    (gateway,) = (tmp_path / "logs").rglob("gateway-0.log")
    assert [json.loads(line)["level"] for line in gateway.read_text().splitlines()]
    assert not list((tmp_path / "state").rglob("*.log"))
