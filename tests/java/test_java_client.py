"""The Java client: it builds offline, its own tests pass, and it works against a running rack.

The last part starts a demo rack; LLAMARACK_URL names another one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo_rack import demo_rack

pytestmark = pytest.mark.java

CLIENT = Path(__file__).parents[2] / "clients" / "java"
BUILD = CLIENT / "build-offline.sh"
LIVE_TESTS = "LiveRackTest,StockHttpClientTest"
# JDK 11 is the oldest the client promises to run on: class files of version 55.
JAVA_11_CLASS_VERSION = 55


def run_build(*arguments: str, timeout_s: int = 280, url: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "LLAMARACK_URL"}
    if url is not None:
        environment["LLAMARACK_URL"] = url
    done = subprocess.run(
        [str(BUILD), *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    if done.returncode == 2 and "hint: apt-get install" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def surefire_counts(output: str) -> tuple[int, int]:
    """(tests run, skipped) of the last summary line."""
    summaries = re.findall(r"Tests run: (\d+), Failures: 0, Errors: 0, Skipped: (\d+)", output)
    assert summaries, output[-2000:]
    return int(summaries[-1][0]), int(summaries[-1][1])


@pytest.fixture(scope="module")
def built() -> str:
    """What Maven says of compiling, testing and packing the client; each of its starts costs seconds."""
    return run_build("package")


def test_client_built_offline_passes_its_own_tests(built: str) -> None:
    run, skipped = surefire_counts(built)
    print(f"surefire: {run} tests run, {skipped} skipped")
    assert run - skipped >= 70, "the golden-server tests did not all run"
    assert list(CLIENT.glob("target/llamarack-client-*.jar"))


@pytest.mark.usefixtures("built")
def test_client_classes_run_on_jdk_11() -> None:
    classes = list((CLIENT / "target" / "classes").rglob("*.class"))
    assert classes
    versions = {int.from_bytes(path.read_bytes()[6:8], "big") for path in classes}
    assert versions == {JAVA_11_CLASS_VERSION}


def test_client_api_pages_have_no_gap() -> None:
    run_build("javadoc")
    assert (CLIENT / "target" / "javadoc" / "io" / "llamarack" / "client" / "LlamarackClient.html").exists()


def test_build_names_the_packages_it_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "java"
    folder.mkdir()
    script = BUILD.read_text().replace("repository=/usr/share/maven-repo", f"repository={tmp_path}/empty")
    copy = folder / "build-offline.sh"
    copy.write_text(script)
    shutil.copymode(BUILD, copy)
    done = subprocess.run([str(copy)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    for package in ("libjackson2-databind-java", "junit5", "maven-debian-helper"):
        assert package in done.stderr


@pytest.fixture(scope="module")
def rack_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The rack named by LLAMARACK_URL, or a demo rack of our own."""
    given = os.environ.get("LLAMARACK_URL")
    if given:
        yield given
        return
    with demo_rack(tmp_path_factory.mktemp("rack"), sequences=4, context_tokens=2048) as url:
        yield url


def test_client_and_stock_http_client_work_against_a_rack(rack_url: str) -> None:
    output = run_build("test", f"-Dtest={LIVE_TESTS}", url=rack_url)
    run, skipped = surefire_counts(output)
    print(f"surefire: {run} tests run, {skipped} skipped")
    assert (run, skipped) == (11, 0)


@pytest.mark.usefixtures("built")
def test_sixty_four_parallel_streams_all_end_well(rack_url: str) -> None:
    class_path = run_build("classpath").strip()
    done = subprocess.run(
        ["java", "-cp", class_path, "io.llamarack.client.LoadTest", rack_url, "64", "8"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.match(r"streams 64  failed 0 ", done.stdout)
