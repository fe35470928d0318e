"""Mul(x, Sigmoid(x)) -> com.microsoft QuickGelu(alpha=1), which is SiLU in one pass over memory."""

from __future__ import annotations

from typing import Any

from ..graph.edit import MICROSOFT


class QuickGelu:
    """SiLU as one kernel."""

    def pattern(self, op: Any, x: Any) -> Any:
        """SiLU as the portable graph writes it."""
        return op.Mul(x, op.Sigmoid(x))

    def check(self, x: Any) -> None:
        """Every SiLU will do."""

    def rewrite(self, op: Any, x: Any) -> Any:
        """QuickGelu is x * sigmoid(alpha * x)."""
        return op.QuickGelu(x, alpha=1.0, _domain=MICROSOFT)
