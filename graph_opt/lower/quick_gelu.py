"""Rewrite Mul(x, Sigmoid(x)) as com.microsoft QuickGelu(alpha=1), SiLU in one pass over memory."""

from __future__ import annotations

from typing import Any

from ..graph.edit import MICROSOFT


class QuickGelu:
    """Fuse SiLU into one kernel."""

    def pattern(self, op: Any, x: Any) -> Any:
        """Match SiLU in its canonical form."""
        return op.Mul(x, op.Sigmoid(x))

    def check(self, x: Any) -> None:
        """Accept every match."""

    def rewrite(self, op: Any, x: Any) -> Any:
        """Write QuickGelu, x * sigmoid(alpha * x)."""
        return op.QuickGelu(x, alpha=1.0, _domain=MICROSOFT)
