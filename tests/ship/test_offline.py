"""The chain on a server without a network: bundle, install, demo, serve, bench, in a namespace without a route."""

import os
import shutil
import subprocess

import pytest

from benchmarks.offline_run import Offline, offline_run, servers_python

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


def test_from_bundle_to_answers_without_a_route() -> None:
    lacking = _lacks()
    if lacking:
        pytest.skip(f"this machine lacks {lacking}; elsewhere: make proof-offline")
    if servers_python() is None:
        pytest.skip("no Python of this version that other users can run; elsewhere: make proof-offline")
    try:
        record = offline_run(None, Offline(engine=None, engine_model=None, is_quick=True))
    except SystemExit as ended:
        if "pip said" in str(ended) or "pip download" in str(ended):
            pytest.skip(f"a bundle cannot be made here: {ended}")
        raise AssertionError(str(ended)) from None
    assert "Paris" in record["answer"]
    assert record["packets_sent_out"] == []
    assert record["trap_catches"]
