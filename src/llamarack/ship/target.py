"""The machine that a bundle is for: its Python and platform, as pip and package metadata name them. Pure but `here`."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass

from llamarack.errors import UsageError

_PLATFORM = re.compile(r"(?:manylinux_2_(\d{1,2})_|manylinux2014_|linux_)?(x86_64|aarch64)")
_DEFAULT_GLIBC = 28  # RHEL 8, Debian 10, Ubuntu 20.04 and later: what the engines' own wheels ask for
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # PEP 600, legacy aliases
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`python`: `3.11`; `glibc_minor`: of glibc 2.x, the oldest that the wheels may ask for; `machine`: `x86_64`."""

    python: str
    machine: str
    glibc_minor: int
    is_here: bool

    @property
    def platform(self) -> str:
        return f"manylinux_2_{self.glibc_minor}_{self.machine}"

    @property
    def pip_options(self) -> list[str]:
        """Options of `pip download`; pip expands neither the newer form nor its aliases by itself."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc_minor, 4, -1)]
        tags += [f"{name}_{self.machine}" for minor, name in _LEGACY.items() if minor <= self.glibc_minor]
        options = ["--only-binary=:all:", "--python-version", self.python, "--implementation", "cp"]
        return options + [word for tag in [*tags, f"linux_{self.machine}"] for word in ("--platform", tag)]

    @property
    def markers(self) -> dict[str, str]:
        """The environment that requirements' markers are judged in (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


def target_of(python: str | None, platform_tag: str | None) -> Target:
    """What the options ask for; without any, a machine like this one. Raises UsageError with the accepted forms."""
    here = _here()
    if python is None and platform_tag is None:
        return here
    wanted = python or here.python
    if not re.fullmatch(r"3\.\d{1,2}", wanted) or _numbers(wanted) < _OLDEST_PYTHON:
        raise UsageError(
            f"`--python {wanted}`: llamarack needs Python 3.11 or newer, written as 3.11", hint="--python 3.11"
        )
    if platform_tag is None:
        return Target(python=wanted, machine=here.machine, glibc_minor=_DEFAULT_GLIBC, is_here=False)
    match = _PLATFORM.fullmatch(platform_tag)
    if match is None:
        raise UsageError(
            f"`--platform {platform_tag}` is not manylinux_2_NN_x86_64 or manylinux_2_NN_aarch64",
            hint="on the server: python3 -c 'import platform; print(platform.libc_ver(), platform.machine())'; "
            "glibc 2.28 on x86_64 is --platform manylinux_2_28_x86_64",
        )
    default = 17 if platform_tag.startswith("manylinux2014") else _DEFAULT_GLIBC
    return Target(python=wanted, machine=match[2], glibc_minor=int(match[1]) if match[1] else default, is_here=False)


def _here() -> Target:
    _, version = platform.libc_ver()
    minor = int(version.split(".")[1]) if version.startswith("2.") else _DEFAULT_GLIBC
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Target(python=python, machine=platform.machine(), glibc_minor=minor, is_here=True)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
