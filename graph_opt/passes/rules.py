"""Pattern rules: a pass made of onnxscript rewrite rules, that counts and explains like every other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from .base import GraphPass, Refusal

if TYPE_CHECKING:
    from onnxscript.rewriter import RewriteRule


class Rule(Protocol):
    """One rewrite. Operands of the pattern reach ``check`` and ``rewrite`` by their names.

    ``pattern(op, x, ...)`` writes the nodes to find, ``rewrite(op, x, ...)`` those to put in their place, and
    ``check(x, ...)`` returns None, or the reason why this match must be left alone.
    """

    @property
    def pattern(self) -> Callable[..., Any]:
        """The nodes to find."""

    @property
    def check(self) -> Callable[..., str | None]:
        """None, or the reason why not."""

    @property
    def rewrite(self) -> Callable[..., Any]:
        """The nodes to put in their place."""


class RulePass(GraphPass):
    """Apply rules wherever they match, the first that fits at each node."""

    def __init__(self, name: str, rules: Sequence[Rule]) -> None:
        from onnxscript.rewriter import RewriteRuleSet  # slow to import, and rarely needed

        super().__init__()
        self.name = name
        self._rules = RewriteRuleSet([self._adapt(rule) for rule in rules])

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite ``model``, its subgraphs and functions."""
        self.fired, self.refusals = 0, []
        self.fired = self._rules.apply_to_model(model)
        return ir.passes.PassResult(model, modified=self.fired > 0)

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
