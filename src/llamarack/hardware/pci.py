"""Which graphics and accelerator cards sit on the PCI bus, driver or not? Read from /sys; no vendor's library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NVIDIA = "nvidia"
# PCI-SIG vendor ids of makers of compute cards. Display chips of servers (ASPEED, Matrox) and of virtual machines
# are not cards in this sense and are left out.
_VENDORS = {
    "0x10de": NVIDIA,
    "0x1002": "amd",
    "0x8086": "intel",
    "0x19e5": "huawei",
    "0x1da3": "habana",
    "0x1ed5": "moore threads",
    "0x1e52": "tenstorrent",
}
# PCI base classes: 0x03 display controller, 0x12 processing accelerator.
_CLASSES = ("0x03", "0x12")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciCard:
    pci_bus_id: str
    vendor: str
    device_id: str
    driver: str | None  # kernel driver bound to it


def read_pci_cards(root: Path = Path("/")) -> tuple[PciCard, ...]:
    cards = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = _VENDORS.get(_text(folder / "vendor"))
        if vendor is not None and _text(folder / "class").startswith(_CLASSES):
            driver = folder / "driver"
            cards.append(
                PciCard(
                    pci_bus_id=folder.name,
                    vendor=vendor,
                    device_id=_text(folder / "device"),
                    driver=driver.resolve().name if driver.exists() else None,
                )
            )
    return tuple(cards)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
