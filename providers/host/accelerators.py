"""List the GPUs and NPUs of this machine, with or without a driver."""

from __future__ import annotations

import sys
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x17cb": "Qualcomm"}
# Base classes of the PCI Code and ID Assignment Specification.
_KINDS = {"0x03": "GPU", "0x12": "accelerator"}
_DISPLAY_ADAPTERS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


def accelerators() -> list[str]:
    """Return names that start with the vendor: ``NVIDIA GPU (10de:2335)``; empty if they cannot be listed."""
    if sys.platform == "win32":
        return _display_adapters()
    names = []
    for device in sorted(_PCI.glob("*")):
        kind = _KINDS.get(_read(device / "class")[:4])
        vendor = _VENDORS.get(_read(device / "vendor"))
        if kind is not None and vendor is not None:
            identity = f"{_read(device / 'vendor')[2:]}:{_read(device / 'device')[2:]}"
            names.append(f"{vendor} {kind} ({identity})")
    return names


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _display_adapters() -> list[str]:
    """Return the display adapters in the Windows registry."""
    import winreg

    registry: dict[str, object] = vars(winreg)
    names: list[str] = []
    open_key, query = registry["OpenKey"], registry["QueryValueEx"]
    for index in range(16):
        try:
            key = open_key(registry["HKEY_LOCAL_MACHINE"], f"{_DISPLAY_ADAPTERS}\\{index:04}")  # type: ignore[operator]
            names.append(str(query(key, "DriverDesc")[0]))  # type: ignore[operator]
        except OSError:
            continue
    return names
