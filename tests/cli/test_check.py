import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from llamarack import config
from llamarack.cli import check as command
from llamarack.cli.check import deployment_findings, request_of
from llamarack.hardware.evidence import Evidence
from llamarack.hardware.finding import Severity
from llamarack.hardware.machine import Machine
from llamarack.units import GIB
from tests.hardware import sound as made
from tests.tiny_model import write_tiny_llama

APP = typer.Typer()
APP.command()(command.check)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    return path


def deployment(model: Path, text: str = "", gateway: str = "{port: 0}") -> str:
    lines = [f"  - name: tiny\n    path: {model}\n    limits: {{context_tokens: 128, sequences: 1}}", text]
    return "schema_version: 1\nmodels:\n" + "\n".join(filter(None, lines)) + f"\ngateway: {gateway}\n"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Evidence], None]:
    """Puts evidence in the place of a look at this machine."""
    return lambda evidence: monkeypatch.setattr(command, "gather", lambda request: evidence)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def test_sound_machine_prints_one_screen_and_ready(seen: Callable[[Evidence], None]) -> None:
    seen(made.sound())
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "ready"
    assert len(lines) <= 24  # a terminal of the old size
    assert max(map(len, lines)) <= 120
    assert [line.split()[-2:] for line in lines if "NV18" in line] == [["X", "NV18"], ["NV18", "X"]]
    assert "64.0 MiB 0.25 ms" in result.stdout
    assert "267 GB/s over the slowest link, 59% of its nominal rate" in result.stdout


def test_error_is_printed_with_its_cure_and_ends_with_status_3(seen: Callable[[Evidence], None]) -> None:
    seen(made.with_variables(CUDA_VISIBLE_DEVICES="7"))
    result = run()
    assert result.exit_code == 3
    assert "unset CUDA_VISIBLE_DEVICES" in result.stdout
    assert result.stdout.splitlines()[-1] == "not ready: 1 error"


def test_warnings_and_notes_leave_the_machine_ready(seen: Callable[[Evidence], None]) -> None:
    seen(made.with_device(persistence_enabled=False, pcie_width=8))
    result = run()
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "ready: 1 warning, 1 note"


def test_json_record_has_the_published_keys(seen: Callable[[Evidence], None]) -> None:
    seen(made.with_device(pcie_width=8))
    record = json.loads(run("--json").stdout)
    assert record["schema_version"] == 1
    card = record["hardware"]["cards"][0]
    published = {"index", "uuid", "vendor", "name", "memory_total_bytes", "memory_free_bytes", "compute_capability"}
    assert published | {"links"} <= set(card)
    assert record["hardware"]["host"]["cores_usable"] == 32
    (finding,) = record["findings"]
    assert set(finding) == {"code", "severity", "subject", "seen", "why", "fix"}
    assert finding["severity"] == "warning"
    assert record["functional"]["context_bytes"] == {"0": 500 * 1024**2, "1": 500 * 1024**2}


@pytest.mark.process
def test_this_machine_is_checked_for_real_with_a_model_and_a_taken_port(model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        file = model.with_suffix(".yaml")
        file.write_text(deployment(model, gateway=f"{{port: {port}}}"))
        result = run("--json", "--no-functional", file)
    record = json.loads(result.stdout)
    assert "port_taken" in {finding["code"] for finding in record["findings"]}
    assert result.exit_code == 3
    assert record["hardware"]["host"]["memory_total_bytes"] > 0
    assert record["disks"][0]["path"] == str(model)
    assert "llamacpp" in {engine["engine"] for engine in record["engines"]}


def load(model: Path, text: str = "") -> config.Deployment:
    file = model.with_suffix(".yaml")
    file.write_text(deployment(model, text))
    return config.load(file).deployment


def test_request_follows_the_file(tmp_path: Path, model: Path) -> None:
    (tmp_path / "python").touch()
    text = f"    engine: vllm\n    engine_python: {tmp_path}/python\n    replicas: 2\n    gpus: [[0], [2, 3]]"
    request = request_of(load(model, text), (), functional=True)
    assert request.model_paths == (model,)
    assert request.interpreters == (tmp_path / "python",)
    assert request.card_indices == (2, 3)
    assert request.wanted.engines == {"vllm"}
    assert request.listen == ()
    assert request_of(load(model, "    gpus: []"), (), functional=True).wanted.engines == frozenset()
    assert request_of(load(model, "    engine_args: {mlock: true}"), (), functional=True).wanted.locks_memory


def small(evidence: Evidence, memory_bytes: int) -> Machine:
    """The machine with less memory, its own and its cards'."""
    machine = evidence.machine
    cards = tuple(
        dataclasses.replace(card, memory_total_bytes=memory_bytes, memory_free_bytes=memory_bytes)
        for card in machine.cards
    )
    host = dataclasses.replace(machine.host, memory_total_bytes=memory_bytes, memory_available_bytes=memory_bytes)
    return dataclasses.replace(machine, cards=cards, host=host)


def test_model_that_fits_has_no_plan_findings(model: Path) -> None:
    found = deployment_findings(load(model), made.sound().machine, set())
    assert [finding for finding in found if finding.severity is Severity.ERROR] == []


def test_model_that_does_not_fit_this_machine_is_an_error_with_numbers(model: Path) -> None:
    found = deployment_findings(load(model), small(made.sound(), GIB // 16), set())
    (error,) = [finding for finding in found if finding.severity is Severity.ERROR]
    assert error.code == "plan_does_not_fit"
    assert "MiB" in error.seen


def test_second_group_is_planned_on_what_the_first_left(model: Path) -> None:
    context = "{context_tokens: 4096, sequences: 512}"
    one = f"  - name: tiny\n    path: {model}\n    gpus: [0]\n    gpu_layers: all\n    limits: {context}\n"
    file = model.with_suffix(".yaml")
    errors = []
    for models in (one, one + one.replace("name: tiny", "name: twin")):
        file.write_text(f"schema_version: 1\nmodels:\n{models}")
        machine = small(made.sound(), 2 * GIB)
        found = deployment_findings(config.load(file).deployment, machine, set())
        errors.append([finding.subject for finding in found if finding.code == "plan_does_not_fit"])
    assert errors == [[], ["twin, llamacpp"]]


def test_card_that_is_not_there_is_an_error(model: Path) -> None:
    found = deployment_findings(load(model, "    gpus: [7]"), made.sound().machine, set())
    assert "hardware_unfit" in {finding.code for finding in found}


def test_broken_model_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    (error,) = deployment_findings(load(broken), made.sound().machine, set())
    assert (error.code, error.severity) == ("model_invalid", Severity.ERROR)


def test_model_on_a_disk_that_does_not_answer_is_not_opened(tmp_path: Path) -> None:
    missing = tmp_path / "away.gguf"
    missing.write_bytes(b"not a model")
    assert deployment_findings(load(missing), made.sound().machine, {str(missing)}) == []


def test_model_with_holes_is_found(model: Path) -> None:
    size = model.stat().st_size
    content = model.read_bytes()[: size // 4]
    model.unlink()
    with model.open("wb") as file:
        file.write(content)
        file.truncate(size)
    found = deployment_findings(load(model), made.sound().machine, set())
    assert "file_has_holes" in {finding.code for finding in found}


def test_tokenizer_named_in_the_file_is_held_against_the_weights(model: Path) -> None:
    plain = {finding.code for finding in deployment_findings(load(model), made.sound().machine, set())}
    empty = model.with_name("empty")
    empty.mkdir()
    text = f"    tokenizer: {empty}"
    named = {finding.code for finding in deployment_findings(load(model, text), made.sound().machine, set())}
    assert "tokenizer_missing" in named - plain
