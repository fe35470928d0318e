"""What quantizing measures beforehand: the float model on a calibration text."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from ..graph_opt.quantize.activations import Tokens
from ..graph_opt.quantize.kv_cache import QuantizeKVPass, kv_scales
from ..graph_opt.quantize.moments import SecondMoments
from ..graph_opt.quantize.sensitivity import dynamic_errors
from ..graph_opt.quantize.smooth import SmoothQuantPass, largest_activations
from ..runtime.calibration import MAX_TOKENS, calibration_windows
from ..runtime.errors import UsageError
from ..runtime.model_source import locate_model
from ..runtime.tokenizer import Tokenizer
from .models import default_context_length, graph_file
from .progress import progress

_GPTQ_TOKENS = 65536  # its moments have many more entries than there are channels


class Calibration:
    """Runs MODEL on a text, as far as that is asked for.

    Args:
        source: MODEL as the user called it.
        model: its graph.
        text: the user's own, or None for the one that comes along.
        scratch: an empty folder that lives as long as the results are needed.
        quiet: no progress.
    """

    def __init__(
        self, source: str, model: ir.Model, text: Path | None, scratch: Path, *, quiet: bool
    ) -> None:
        self._source = source
        self._model = model
        self._text = text
        self._scratch = scratch
        self._quiet = quiet

    def kv_pass(self) -> QuantizeKVPass:
        """Measure the scales of the KV cache."""
        with progress("calibrate", quiet=self._quiet) as tell:
            return QuantizeKVPass(
                kv_scales(self._graph, self._windows, context_length=self._context_length, progress=tell)
            )

    def moments(self) -> SecondMoments:
        """Measure what goes into the layers, those of large models when their turn comes."""
        windows = self._read(_GPTQ_TOKENS)
        moments = SecondMoments(self._graph, windows, context_length=self._context_length)
        with progress("calibrate", quiet=self._quiet) as tell:
            moments.measure_first(tell)
        return moments

    def smooth_pass(self) -> SmoothQuantPass:
        """Measure the channels between norms and layers."""
        with progress("calibrate", quiet=self._quiet) as tell:
            largest = largest_activations(
                self._graph, self._windows, context_length=self._context_length, progress=tell
            )
        return SmoothQuantPass(largest)

    def sensitive_layers(self, max_error: float) -> dict[str, float]:
        """Find the weights whose products dynamic int8 would change by more than ``max_error``."""
        longest = max(self._windows, key=len)
        with progress("calibrate", quiet=self._quiet) as tell:
            errors = dynamic_errors(self._graph, longest, progress=tell)
        return {name: error for name, error in errors.items() if error > max_error}

    @cached_property
    def _graph(self) -> Path:
        return graph_file(self._source, self._scratch / "float")

    @cached_property
    def _context_length(self) -> int:
        length = default_context_length(self._source, self._model)
        if length is None:
            raise UsageError(
                f"{self._source} does not say how long its context is; quantize its package instead"
            )
        return length

    @cached_property
    def _windows(self) -> list[Tokens]:
        return self._read(MAX_TOKENS)

    def _read(self, max_tokens: int) -> list[Tokens]:
        path = locate_model(self._source)
        tokenizer = Tokenizer(path.parent if path.is_file() else path)
        return calibration_windows(
            tokenizer, self._text, context_length=self._context_length, max_tokens=max_tokens
        )
