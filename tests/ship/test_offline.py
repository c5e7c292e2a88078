"""The chain on a server without a network: bundle, install, demo, serve, bench, in a namespace without a route."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.offline_run import offline_run
from llamarack.errors import LlamarackError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.ship.bundle import Wanted, make_bundle
from llamarack.ship.target import target_of

pytestmark = pytest.mark.llamacpp


def _lacks() -> str | None:
    """What this machine lacks for a namespace of its own."""
    missing = [name for name in ("unshare", "ip", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} (Debian: util-linux, iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "true"], check=False
    )
    return None if tried.returncode == 0 else "the right to make a network namespace"


def test_from_bundle_to_answers_without_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = _lacks()
    if lacking:
        pytest.skip(f"this machine lacks {lacking}; elsewhere: make proof-offline")
    name = f"python3.{sys.version_info.minor}"
    pythons = [Path(folder) / name for folder in (f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin")]
    usable = [path for path in pythons if path.exists() and (os.getuid() != 0 or _others_can_run(path))]
    if not usable:
        pytest.skip(f"no {name} here that other users can run; elsewhere: make proof-offline")
    monkeypatch.setenv("PYTHON", str(usable[0]))
    # pytest's folders are closed to other users, and the service of this test is one.
    with tempfile.TemporaryDirectory(prefix="llamarack-bundle-") as folder:
        Path(folder).chmod(0o755)
        bundle = Path(folder) / "bundle"
        try:
            model = demo_model(cache_dir(), print)
            make_bundle(bundle, Wanted(target=target_of(None, None), recipes=[], models=[model]), print)
        except LlamarackError as error:
            pytest.skip(f"a bundle cannot be made here: {error}")
        record = offline_run(bundle, is_quick=True)
    assert "Paris" in record["answer"]
    assert record["packets_sent_out"] == []
    assert record["trap_catches"]


def _others_can_run(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in [path.resolve(), *path.resolve().parents])
