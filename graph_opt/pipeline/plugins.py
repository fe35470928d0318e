"""Passes from anywhere: by module and class, or by the name under which an installed package offers them."""

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
    """Return the passes that installed packages offer in the entry-point group ``carryall.passes``."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def load_pass(spec: str) -> ir.passes.PassBase:
    """Make a pass of anybody's, without touching carryall.

    Args:
        spec: ``package.module.Class`` or ``package.module:Class``, of a pass or of a rule; or the name of an
            entry point in the group ``carryall.passes``.

    Raises:
        UsageError: the text has another form, the module does not import, or the class is neither.
    """
    if not {".", ":"} & set(spec):
        return _make(spec, _installed(spec))
    module_name, _, class_name = spec.partition(":") if ":" in spec else spec.rpartition(".")
    if not module_name or not class_name:
        raise UsageError(f"a pass is given as 'package.module.Class', not '{spec}'")
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
            f"no installed package offers a pass '{name}' (offered: {known}); "
            "a pass of your own is given as 'package.module.Class'"
        )
    try:
        return points[name].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"pass '{name}': {points[name].value} cannot be imported: {error}") from error


def _make(spec: str, made: Any) -> ir.passes.PassBase:
    is_pass = isinstance(made, type) and issubclass(made, ir.passes.PassBase)
    is_rule = isinstance(made, type) and all(callable(getattr(made, name, None)) for name in _RULE_METHODS)
    if not is_pass and not is_rule:
        raise UsageError(
            f"pass '{spec}' is no class derived from onnx_ir.passes.PassBase, "
            f"and no rule with {', '.join(_RULE_METHODS)}"
        )
    try:
        found = made()
    except TypeError as error:
        raise UsageError(f"pass '{spec}' must be constructible without arguments: {error}") from error
    result: ir.passes.PassBase = found if is_pass else RulePass(made.__name__, [found])
    return result
