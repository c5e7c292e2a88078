"""A company's own index, certificate authority and proxy are honoured: a real HTTPS server and proxy, on loopback."""

import contextlib
import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from llamarack.errors import UsageError
from llamarack.ship.target import Target
from llamarack.ship.wheelhouse import collect
from tests.ship.wheels import write_wheel

pytestmark = pytest.mark.process
TARGET = Target(python="3.12", machine="x86_64", glibc_minor=28, is_here=False)


class _Index(http.server.BaseHTTPRequestHandler):
    """PEP 503 over one folder; as a proxy it answers for every host."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        parts = [part for part in urlsplit(self.path).path.split("/") if part]
        wheels = sorted(path.name for path in self.folder.glob("*.whl"))
        if len(parts) == 2 and parts[0] == "simple":
            links = [f'<a href="/files/{name}">{name}</a>' for name in wheels if name.startswith(parts[1])]
            body, kind = "\n".join(links).encode(), "text/html"
        elif len(parts) == 2 and parts[1] in wheels:
            body, kind = (self.folder / parts[1]).read_bytes(), "application/octet-stream"
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _served(folder: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[tuple[int, list[str]]]:
    asked: list[str] = []
    handler = type("Handler", (_Index,), {"folder": folder, "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "engine", "1.0", {"engine.py": ""}, requires=["helper"])
    write_wheel(folder, "helper", "2.0", {"helper.py": ""})
    (tmp_path / "out").mkdir()
    return folder


def test_index_behind_a_companys_own_authority(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here (Debian: openssl)")
    certificate, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=corp", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", *subject, *files],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with _served(wheels, (certificate, key)) as (port, asked):
        monkeypatch.setenv("PIP_INDEX_URL", f"https://127.0.0.1:{port}/simple")
        with pytest.raises(UsageError) as caught:
            collect(["engine"], TARGET, tmp_path / "out", tell=lambda _: None)
        assert "PIP_CERT=" in str(caught.value.hint)
        assert asked == []
        monkeypatch.setenv("PIP_CERT", str(certificate))
        found = collect(["engine"], TARGET, tmp_path / "out", tell=lambda _: None)
    assert [wheel.name for wheel in found] == ["engine", "helper"]
    assert "/simple/helper/" in asked


def test_proxy_is_asked_for_an_index_that_cannot_be_reached(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _served(wheels) as (port, asked):
        monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
        monkeypatch.setenv("PIP_TRUSTED_HOST", "index.invalid")
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        found = collect(["engine"], TARGET, tmp_path / "out", tell=lambda _: None)
    assert [wheel.name for wheel in found] == ["engine", "helper"]
    assert "http://index.invalid/simple/engine/" in asked
