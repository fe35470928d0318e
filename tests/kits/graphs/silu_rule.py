"""A rule of a package that adds passes, as in docs/adding_a_pass.md."""

from __future__ import annotations

from typing import Any


class Silu:
    """Fuse x * sigmoid(x) into onnxruntime's QuickGelu."""

    def pattern(self, op: Any, x: Any) -> Any:
        """Match SiLU in its canonical form."""
        return op.Mul(x, op.Sigmoid(x))

    def check(self, x: Any) -> None:
        """Accept every match."""

    def rewrite(self, op: Any, x: Any) -> Any:
        """Write QuickGelu, x * sigmoid(alpha * x)."""
        return op.QuickGelu(x, alpha=1.0, _domain="com.microsoft")
