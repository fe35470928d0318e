"""Providers as ``onnxruntime.InferenceSession`` takes them: names, each alone or with its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Providers = Sequence[str | tuple[str, dict[Any, Any]]]
