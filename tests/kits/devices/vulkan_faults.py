"""Run the WebGPU provider over ``vulkan_faults.c``: a driver whose memory ends, and whose device is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import software_gpu

_HERE = Path(__file__).parent
_KITS = _HERE.parent


def run(scenario: str, folder: Path) -> Any:
    """Run a function of ``vulkan_scenarios.py`` in a process; return its result.

    Args:
        scenario: the function's name.
        folder: an empty folder for the driver.
    """
    driver, compiler = software_gpu.driver(), shutil.which("gcc")
    if driver is None or compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("faults of a driver need Linux, gcc and Vulkan in software")
    library = folder / "libvulkan_faults.so"
    source = _HERE / "vulkan_faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", source, "-o", library, "-ldl"], check=True)
    described = json.loads(driver.read_text())
    environment = {
        **os.environ,
        "VULKAN_FAULTS_DRIVER": str(_beside(driver, described["ICD"]["library_path"])),
        "VK_ICD_FILENAMES": str(folder / "driver.json"),
        "PYTHONPATH": os.pathsep.join(map(str, [*_KITS.glob("*/"), _KITS])),
    }
    described["ICD"]["library_path"] = str(library)
    (folder / "driver.json").write_text(json.dumps(described))
    done = subprocess.run(
        [sys.executable, str(_HERE / "vulkan_scenarios.py"), scenario, str(library)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _beside(file: Path, library: str) -> Path:
    """Return the path of a library as the loader of Vulkan reads it: names without a folder are looked up."""
    return file.parent / library if "/" in library else Path(library)
