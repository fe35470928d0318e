"""Build hook: installing from source compiles the CPU kernels if there is a C++ compiler.

All other settings are in ``pyproject.toml``. ``CARRYALL_BUILD_KERNELS=1`` requires the kernels, ``0`` omits
them, as for a wheel that serves every platform. ``carryall doctor --build-kernels`` builds them later.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).resolve().parent / "src" / "carryall" / "providers" / "native"
SETTING = os.environ.get("CARRYALL_BUILD_KERNELS", "")
sys.path.insert(0, str(NATIVE))  # carryall itself cannot be imported before its dependencies are installed
import compiler  # noqa: E402

WANTED = SETTING == "1" or (not SETTING and compiler.find_compiler() is not None)


class BuildWithKernels(build_py):
    """Copies the package, then compiles the library into it, or into the checkout of an editable install."""

    def run(self) -> None:
        """Run the command."""
        super().run()
        if not WANTED:
            return
        package = NATIVE if self.editable_mode else Path(self.build_lib, "carryall", "providers", "native")
        target = compiler.installed_library(package)
        if self.editable_mode and target.is_file():
            return
        shutil.rmtree(package / "built", ignore_errors=True)  # of older sources
        try:
            compiler.compile_library(compiler.required_compiler(), target)
        except (compiler.CompilerError, OSError) as error:
            shutil.rmtree(package / "built", ignore_errors=True)
            if SETTING == "1":
                raise
            warnings.warn(f"carryall is installed without its CPU kernels: {error}", stacklevel=1)


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


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
