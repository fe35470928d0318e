"""Pattern rules: a ``GraphPass`` made of onnxscript rewrite rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from .base import GraphPass, Refusal

if TYPE_CHECKING:
    from onnxscript.rewriter import RewriteRule, RewriteRuleSet


class Rule(Protocol):
    """One rewrite rule. ``check`` and ``rewrite`` receive the pattern's operands by name.

    ``pattern(op, x, ...)`` builds the nodes to match, ``rewrite(op, x, ...)`` their replacement, and
    ``check(x, ...)`` returns None, or the reason why a match must not be rewritten.
    """

    @property
    def pattern(self) -> Callable[..., Any]:
        """Build the nodes to match."""

    @property
    def check(self) -> Callable[..., str | None]:
        """Return None, or the reason why a match must not be rewritten."""

    @property
    def rewrite(self) -> Callable[..., Any]:
        """Build the replacement."""


class RulePass(GraphPass):
    """Apply rules wherever they match; at each node the first matching rule."""

    def __init__(self, name: str, rules: Sequence[Rule]) -> None:
        super().__init__()
        self.name = name
        self._rules = rules

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, including subgraphs and functions."""
        self.fired, self.refusals = 0, []
        self.fired = self._rule_set.apply_to_model(model)
        return ir.passes.PassResult(model, modified=self.fired > 0)

    @cached_property
    def _rule_set(self) -> RewriteRuleSet:
        from onnxscript.rewriter import RewriteRuleSet  # slow to import, and a cached model needs no rules

        return RewriteRuleSet([self._adapt(rule) for rule in self._rules])

    def _adapt(self, rule: Rule) -> RewriteRule:
        from onnxscript.rewriter import MatchResult, RewriteRule

        def condition(context: Any, **operands: Any) -> Any:
            reason = rule.check(**operands)
            if reason is None:
                return True
            node: ir.Node = context.root
            self.refusals.append(Refusal(node.name or node.op_type, reason))
            return MatchResult().fail(reason)

        return RewriteRule(rule.pattern, rule.rewrite, condition, name=type(rule).__name__)

    def rewrite(self, graph: ir.Graph) -> None:
        """Not used: rules work on the whole model."""
        raise NotImplementedError
