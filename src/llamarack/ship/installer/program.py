"""The installer as one file that a bare Python runs: `python -I install.pyz`, a zip of these modules (PEP 441)."""

import zipfile
from pathlib import Path

FILE = "install.pyz"
_PACKAGE = Path(__file__).parent
_MAIN = "from llamarack.ship.installer.command_line import main\n\nmain()\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time a zip can name: the same modules give the same file


def write(path: Path) -> None:
    """Its modules keep their names in it, and the packages above them are empty: nothing else of llamarack is there."""
    texts = {"__main__.py": _MAIN, "llamarack/__init__.py": "", "llamarack/ship/__init__.py": ""}
    for module in sorted(_PACKAGE.glob("*.py")):
        texts[f"llamarack/ship/installer/{module.name}"] = module.read_text(encoding="utf-8")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text)
