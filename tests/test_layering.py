"""Imports point one way: a package may use only those before it."""

import ast
from pathlib import Path

import llamarack

ROOT = Path(llamarack.__file__).parent
ORDER = ["version", "errors", "yaml_text", "units", "rpc_address", "paths", "logs", "environment", "config", "hardware"]
ORDER += ["model", "plan", "engine", "supervise", "gateway", "measure", "judge", "report", "ship", "embed"]
ORDER += ["cli", "__main__"]


def _station(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imported_stations(path: Path) -> set[str]:
    stations = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"llamarack.{alias.name}" for alias in node.names] if node.module == "llamarack" else [node.module]
        stations |= {name.split(".")[1] for name in names if name.startswith("llamarack.")}
    return stations - {"__version__"}


def test_imports_point_backwards_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {station}"
        for path in ROOT.rglob("*.py")
        if _station(path) != "__init__"
        for station in _imported_stations(path)
        if station != _station(path) and ORDER.index(station) > ORDER.index(_station(path))
    ]
    assert not wrong


def test_every_package_is_in_the_order() -> None:
    assert {_station(path) for path in ROOT.rglob("*.py")} <= {*ORDER, "__init__"}
