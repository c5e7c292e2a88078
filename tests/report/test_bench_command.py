"""The command as a user runs it: a child process against the golden server."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from llamarack.cli.bench import levels, read_key, seconds
from llamarack.errors import UsageError
from llamarack.measure.point import Level
from llamarack.measure.result import RECORDS_NAME, RESULT_NAME, read_records
from tests.measure.golden_server import GoldenServer, Script, models, no_wait, obedient_script, serving, steps

COMMAND = [sys.executable, "-c", "import typer; from llamarack.cli.bench import bench; typer.run(bench)"]
SMALL = ["--concurrency", "1,2", "--requests", "20", "--input-tokens", "16", "--output-tokens", "4"]
TIMEOUT_S = 60


async def run(script, *arguments: str, interrupt_after: int | None = None) -> tuple[int | None, str, str]:
    """Exit code, standard output, standard error; SIGINT once the server has seen so many requests."""
    server = GoldenServer(scripts={"m": script}, between=no_wait, plain={"/v1/models": lambda _: models("m")})
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with serving(server, listener) as port, asyncio.timeout(TIMEOUT_S):
        child = await asyncio.create_subprocess_exec(
            *COMMAND,
            f"http://127.0.0.1:{port}/v1",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        while len(server.bodies) < (interrupt_after or 0):
            await asyncio.sleep(0.01)
        if interrupt_after is not None:
            child.send_signal(signal.SIGINT)
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


@pytest.mark.process
async def test_json_is_the_only_thing_on_standard_output_and_its_verdict_is_the_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, err = await run(obedient_script, *SMALL, "--json", "--slo", "ttft:60000", "-o", str(folder))
    result = json.loads(out)
    assert code == (0 if result["valid"] else 7)
    assert [point["requests"] for point in result["points"]] == [20, 20]
    assert [point["failures"] for point in result["points"]] == [0, 0]
    assert result["points"][0]["goodput"]["attainment_fraction"] == 1.0
    assert "1 of 2: concurrency 1" in err
    assert str(folder / "report.html") in err
    assert {path.name for path in folder.iterdir()} == {RECORDS_NAME, RESULT_NAME, "report.html", "report.md"}


@pytest.mark.process
async def test_failing_server_gives_exit_7_and_its_own_words(tmp_path: Path) -> None:
    def refuses(body) -> Script:
        refusal = Script(steps=steps(b'{"error": {"message": "queue full"}}'), status=503)
        return refusal if len(body["messages"][0]["content"].split()) == 11 else obedient_script(body)

    code, out, _ = await run(refuses, *SMALL, "-o", str(tmp_path / "run"))
    assert code == 7
    assert "INVALID" in out
    assert "queue full" in out


@pytest.mark.process
async def test_interrupt_keeps_what_was_measured_and_gives_exit_130(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    many = [*SMALL[:2], "--requests", "100000", *SMALL[4:], "--json", "-o", str(folder)]
    code, out, _ = await run(obedient_script, *many, interrupt_after=100)
    assert code == 130
    result = json.loads(out)
    assert result["is_interrupted"]
    assert not result["valid"]
    assert 0 < result["points"][0]["requests"] < 100_000
    assert (folder / "report.html").exists()


@pytest.mark.process
async def test_killed_command_leaves_no_worker_behind_and_keeps_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    server = GoldenServer(scripts={"m": obedient_script}, between=no_wait, plain={"/v1/models": lambda _: models("m")})
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with serving(server, listener) as port, asyncio.timeout(TIMEOUT_S):
        many = ["--concurrency", "2", "--requests", "100000", "--input-tokens", "16", "--output-tokens", "4"]
        child = await asyncio.create_subprocess_exec(
            *COMMAND, f"http://127.0.0.1:{port}", *many, "-o", str(folder), stderr=asyncio.subprocess.DEVNULL
        )
        while len(server.bodies) < 100:
            await asyncio.sleep(0.01)
        workers = psutil.Process(child.pid).children(recursive=True)
        assert workers
        child.kill()
        await child.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=TIMEOUT_S)
        assert alive == []
    assert len(list(read_records(folder / RECORDS_NAME))) >= 50


def test_levels_are_read_from_lists() -> None:
    assert levels("1,8, 64", None) == (Level(concurrency=1), Level(concurrency=8), Level(concurrency=64))
    assert levels("1", "0.5,2") == (Level(rate_per_s=0.5), Level(rate_per_s=2.0))


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1,,2", "1.5", "nan"])
def test_level_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        levels(text, None)
    assert caught.value.hint == "--concurrency 1,8,64"


@pytest.mark.parametrize("text", ["inf", "nan", "0", "1e9"])
def test_rate_that_is_no_usable_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        levels("1", text)


def test_duration_must_be_above_zero() -> None:
    assert seconds("--duration", "2m") == 120.0
    for text in ("0s", "soon"):
        with pytest.raises(UsageError):
            seconds("--duration", text)


def test_key_comes_from_the_file_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    monkeypatch.delenv("LLAMARACK_API_KEY", raising=False)
    assert read_key(None) == "from-environment"
    (tmp_path / "key").write_text("from-file\n")
    assert read_key(tmp_path / "key") == "from-file"
    (tmp_path / "key").write_text("two\r\nX-Injected: 1")
    with pytest.raises(UsageError) as caught:
        read_key(tmp_path / "key")
    assert "Injected" not in caught.value.message
