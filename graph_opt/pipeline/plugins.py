"""Load passes of other packages, by module and class or by entry point."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import onnx_ir as ir

from ...errors import UsageError
from ..passes.rules import RulePass

ENTRY_POINT_GROUP = "carryall.passes"
_RULE_METHODS = ("pattern", "check", "rewrite")


def installed_passes() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the passes that installed packages register in the entry-point group ``carryall.passes``."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def load_pass(spec: str) -> ir.passes.PassBase:
    """Load and construct a pass of another package.

    Args:
        spec: ``package.module.Class`` or ``package.module:Class`` of a pass or a rule, or the name of an
            entry point in the group ``carryall.passes``.

    Raises:
        UsageError: ``spec`` has another form, the module cannot be imported, or the class is not a pass or
            rule.
    """
    if not {".", ":"} & set(spec):
        return _make(spec, _installed(spec))
    module_name, _, class_name = spec.partition(":") if ":" in spec else spec.rpartition(".")
    if not module_name or not class_name:
        raise UsageError(f"a pass must be given as 'package.module.Class', found '{spec}'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"pass '{spec}': module '{module_name}' cannot be imported: {error}") from error
    return _make(spec, getattr(module, class_name, None))


def _installed(name: str) -> Any:
    points = installed_passes()
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise UsageError(
            f"no installed package registers a pass '{name}' (registered: {known}); "
            "give any other pass as 'package.module.Class'"
        )
    try:
        return points[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"pass '{name}': {points[name].value} cannot be imported: {error}") from error


def _make(spec: str, loaded: Any) -> ir.passes.PassBase:
    is_pass = isinstance(loaded, type) and issubclass(loaded, ir.passes.PassBase)
    is_rule = isinstance(loaded, type) and all(
        callable(getattr(loaded, name, None)) for name in _RULE_METHODS
    )
    if not is_pass and not is_rule:
        raise UsageError(
            f"'{spec}' is neither a subclass of onnx_ir.passes.PassBase "
            f"nor a rule with the methods {', '.join(_RULE_METHODS)}"
        )
    try:
        found = loaded()
    except TypeError as error:
        raise UsageError(f"pass '{spec}' must be constructible without arguments: {error}") from error
    result: ir.passes.PassBase = found if is_pass else RulePass(loaded.__name__, [found])
    return result
