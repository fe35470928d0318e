"""Modules that onnx_ir imports but needs for little, imported at their first use.

onnx_ir 1.1 imports sympy at its top for arithmetic on symbolic sizes: 0.5 s of every command that reads a
graph, half of what such a command takes before it works. No pass here computes with symbolic sizes. onnx,
which it imports, does so with protobuf's modules for graphs written as text, 20 ms, and for messages without
its library, 5 ms, with tools that merge graphs and unpack archives, 12 ms, and with importlib.metadata for
its own version, 10 ms.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # importing it takes 20 ms
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

_LIBRARY = "onnx_ir"
# The second reads attributes of the first at its top.
_DEFERRED = (
    *("sympy", "onnx_ir._symbolic_shapes"),
    *(
        "google.protobuf.json_format",
        "google.protobuf.text_format",
        "google.protobuf.internal.python_message",
    ),
    *("onnx.compose", "onnx.gen_proto", "onnx.utils"),
    *("importlib.metadata", "packaging.version"),
)


class _Deferred(ModuleType):
    """Stands for a module inside of onnx_ir, and in its package; is no entry of ``sys.modules``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system, for instance `__path__`
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:  # while onnx_ir is imported
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _DeferredMetadata(_Deferred):
    """Stands for ``importlib.metadata``, and tells the version of most distributions without it."""

    def version(self, name: str) -> str:
        from .storage.distributions import distribution_folder, distribution_version  # 3 ms

        folder = distribution_folder(name)
        if folder is not None:
            return distribution_version(folder)
        found: str = self.__getattr__("version")(name)
        return found


class _Loader:
    """Runs onnx_ir's own loader while stand-ins take the place of the deferred modules."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``importlib.abc.Loader``."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See ``importlib.abc.Loader``."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader  # what others ask it for, such as its source, is not in this class
        module.__loader__ = self._loader
        names = [name for name in _DEFERRED if name not in sys.modules]
        stand_ins = {name: _KINDS.get(name, _Deferred)(name) for name in names}
        sys.modules.update(stand_ins)
        _place(stand_ins)
        try:
            self._loader.exec_module(module)
        finally:
            for name, stand_in in stand_ins.items():
                if sys.modules.get(name) is stand_in:
                    del sys.modules[name]
            _place(stand_ins)


_KINDS = {"importlib.metadata": _DeferredMetadata}


def _place(stand_ins: Mapping[str, _Deferred]) -> None:
    """Make stand-ins attributes of those packages that are imported, until their modules are."""
    for name, stand_in in stand_ins.items():
        package, _, own = name.rpartition(".")
        if package in sys.modules and not hasattr(sys.modules[package], own):
            setattr(sys.modules[package], own, stand_in)


class _Finder:
    """Finds onnx_ir where the finders behind it find it, and finds nothing else.

    One is enough: a second copy of this package in the process, such as a checkout beside the installed
    package, must neither add another nor ask this one.
    """

    defers = _LIBRARY

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if fullname != _LIBRARY:
            return None
        others = [finder for finder in sys.meta_path if not _defers(finder)]
        specs = (
            finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Any, _Loader(spec.loader))
        return spec


def _defers(finder: object) -> bool:
    return getattr(finder, "defers", None) == _LIBRARY


def defer_sympy() -> None:
    """Import sympy at its first use by onnx_ir, unless onnx_ir is imported already; may be called again."""
    if _LIBRARY not in sys.modules and not any(map(_defers, sys.meta_path)):
        sys.meta_path.insert(0, _Finder())
