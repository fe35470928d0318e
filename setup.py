"""Build hook: a wheel with the CPU kernels if ``CARRYALL_BUILD_KERNELS`` is set, else one of Python only.

All other settings are in ``pyproject.toml``. Without the variable, installing needs no compiler, and
``carryall doctor --build-kernels`` builds the kernels later.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
WANTED = bool(os.environ.get("CARRYALL_BUILD_KERNELS"))


class BuildWithKernels(build_py):
    """Copies the package, then builds the library beside the sources."""

    def run(self) -> None:
        """Run the command."""
        super().run()
        if WANTED and not self.editable_mode:
            sys.path.insert(0, str(ROOT / "src"))
            from carryall.providers.native.build import build_library, library_name

            build_library(Path(self.build_lib, "carryall", "providers", "native", library_name()))


class PlatformWheel(bdist_wheel):
    """Names a wheel with kernels after its platform; it serves every Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if WANTED else (python, abi, platform)


class PlatformDistribution(Distribution):
    """A distribution that says whether it has compiled code."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel is for one platform."""
        return WANTED


setup(
    distclass=PlatformDistribution,
    setup_requires=["numpy", "platformdirs"] if WANTED else [],  # imported by the build of the kernels
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
