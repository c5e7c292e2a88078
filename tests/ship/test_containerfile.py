"""The steps of the Containerfile, done in an overlay over this machine's own Debian or Ubuntu: not an image build, but
the same commands, users and environment.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarack.ship.bundle import containerfile_text
from llamarack.ship.container import USER_ID
from tests.ship.wheels import write_bundle

pytestmark = pytest.mark.process
_INNER = """
set -eu
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cp -r "$2" "$1/root/bundle"
mount -t proc proc "$1/root/proc"
mount --bind /dev "$1/root/dev"
chroot "$1/root" sh -ec "$3"
"""


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", containerfile_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def _environment() -> dict[str, str]:
    pairs = [pair.split("=", 1) for name, words in _instructions() if name == "ENV" for pair in words.split()]
    return dict(pairs)


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llamarack-image-") as folder:
        yield Path(folder)


def test_instructions_give_a_service_without_rights(place: Path) -> None:
    name = f"python3.{sys.version_info.minor}"
    bases = [Path(folder) / name for folder in ("/usr/local/bin", "/usr/bin") if (Path(folder) / name).exists()]
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    if os.getuid() != 0 or tried.returncode or not bases:
        pytest.skip(f"needs root, mount namespaces and {name} of the system")
    write_bundle(place / "bundle", "1.0")
    (place / "mnt").mkdir()
    runs = [words for instruction, words in _instructions() if instruction == "RUN"]
    environment = _environment() | {"PATH": f"/opt/llamarack/bin:{bases[0].parent}:/usr/bin:/bin"}
    exports = "; ".join(f"export {key}={shlex.quote(value)}" for key, value in environment.items())
    as_user = f"setpriv --reuid={USER_ID} --regid={USER_ID} --clear-groups --no-new-privs"
    script = "; ".join(
        [
            *runs,
            exports,
            "test ! -e /bundle",
            f"{as_user} llamarack serve /etc/llamarack/rack.yaml",
            f"{as_user} sh -c 'touch $HOME/x $LLAMARACK_CACHE_DIR/x; ! touch /opt/llamarack/x 2>/dev/null; id -u'",
            "setpriv --reuid=4711 --regid=4711 --clear-groups sh -c 'mkdir $HOME/racks'",
        ]
    )
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", _INNER, "sh", str(place / "mnt")]
    done = subprocess.run(
        [*command, str(place / "bundle"), script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    if "mount:" in done.stderr:
        pytest.skip(f"no overlay here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["llamarack 1.0", str(USER_ID)]


def test_it_ends_as_the_user_of_the_manifests() -> None:
    assert ("USER", f"{USER_ID}:{USER_ID}") in _instructions()
    assert ("ENTRYPOINT", '["llamarack"]') in _instructions()
    volumes = next(words for name, words in _instructions() if name == "VOLUME")
    assert {_environment()["LLAMARACK_STATE_DIR"], _environment()["LLAMARACK_CACHE_DIR"]} == set(
        re.findall(r'"([^"]+)"', volumes)
    )
