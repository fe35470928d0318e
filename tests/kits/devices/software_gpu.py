"""A GPU in software for the provider ``webgpu``: the driver in ``VK_ICD_FILENAMES``, or one of those below.

Debian's ``mesa-vulkan-drivers`` is new enough from version 25 on; Chromium brings SwiftShader.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

DRIVERS = (
    "/usr/share/vulkan/icd.d/lvp_icd.json",
    "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json",
    "/usr/lib/chromium/vk_swiftshader_icd.json",
)
_LOADER = "libvulkan.so.1"


def driver() -> Path | None:
    """Return the file that describes the driver, None if there is none."""
    named = os.environ.get("VK_ICD_FILENAMES")
    found = (Path(file) for file in ([named] if named else DRIVERS) if Path(file).is_file())
    return next(found, None)


def enable() -> None:
    """Let this process and its children use the driver, if there is one; before the plugin is loaded."""
    file = driver()
    if file is None:
        return
    os.environ["VK_ICD_FILENAMES"] = str(file)
    os.environ["ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"] = "1"
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(
        filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(file.parent)])
    )
    # Libraries are looked up when a process starts, so this one needs the loader of Vulkan from its file.
    for place in (_LOADER, file.parent / _LOADER):
        try:
            ctypes.CDLL(str(place))
        except OSError:
            continue
        return
