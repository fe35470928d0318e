"""Measurements of the float model on a calibration text, which quantization needs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from ...contract import ENCODER_STATES
from ...errors import UsageError
from ...exporter.config import CONFIG_FILE
from ...exporter.package import MODEL_FILE
from ...graph_opt.analysis.decoder_inputs import find_input
from ...graph_opt.graph.saving import save_model
from ...graph_opt.passes.base import GraphPass
from ...graph_opt.pipeline.pipeline import run
from ...graph_opt.quantize.algorithms.blockwise import BlockFormat, Floats, Quantizer
from ...graph_opt.quantize.algorithms.smooth import largest_activations, smoothing_factors
from ...graph_opt.quantize.calibration.activations import Tokens
from ...graph_opt.quantize.calibration.calibrators import CALIBRATORS, Histogram
from ...graph_opt.quantize.formats.kv_cache import QuantizeKVPass, kv_scales
from ...graph_opt.quantize.formats.weight_only import Promote, WeightFormats
from ...graph_opt.quantize.search.budget import FormatPlan, choices, promote, spend_bits, spend_divergence
from ...graph_opt.quantize.search.calibrated import CALIBRATED, QuantizedLayers, quantize_layers
from ...graph_opt.quantize.search.half_range import largest_magnitudes, too_large
from ...graph_opt.quantize.search.outliers import sensitive_weights
from ...graph_opt.quantize.search.ranges import input_histograms
from ...graph_opt.quantize.search.sensitivity import Rounding, float_inputs, product_errors
from ...graph_opt.quantize.search.weight_inputs import WeightInputs
from ...progress import Progress, phase
from ...providers.native.rounding import native_arithmetic, native_quantizer
from ...records import dataclass
from ...storage.cache import CachedParts
from ...storage.remembered import Arrays, cached_arrays
from ..text.tokenizer import TOKENIZER_FILE, Tokenizer
from .calibration import READ_TOKENS, ROUNDING_TOKENS, calibration_windows

_PLAN_WINDOWS, _PLAN_WINDOW = 2, 192  # windows, and tokens of each, that measure the sensitivity of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatSource:
    """What is known of a float model.

    Attributes:
        name: the user's name of it.
        folder: the folder of its tokenizer.
        context_length: its default context length in tokens, None if its files state none.
        key: returns a text that changes whenever the model does.
        path: its ONNX file; None if it has none.
    """

    name: str
    folder: Path
    context_length: int | None
    key: Callable[[], str]
    path: Path | None = None


class FloatModel:
    """Run a float model on a text and measure what a recipe asks for; slow measurements are cached.

    A context, in which the quantized graph is written: the results of ``layers`` are stored until its end,
    or, if it ends with an error or is killed, until the next one has written them.

    Args:
        source: what is known of the model.
        model: its graph.
        text: the calibration text; None takes the built-in one.
        scratch: an empty folder, which must exist as long as the results are used.
        tokens: number of tokens of the text to read; None takes the default of the method.
        progress: called for every window and layer, in the phases ``calibrate`` and ``measure``.
        keeps: whether weights that are rounded without a text are stored, too: the graph is written within
            the context, and rounding takes longer than storing.
        stored: gets the stored results of layers.
    """

    def __init__(
        self,
        source: FloatSource,
        model: ir.Model,
        text: Path | None,
        scratch: Path,
        *,
        tokens: int | None = None,
        progress: Progress | None = None,
        keeps: bool = False,
        stored: list[CachedParts] | None = None,
    ) -> None:
        self._source = source
        self._model = model
        self._text = text
        self._scratch = scratch
        self._tokens = tokens
        self._progress = progress
        self._keeps = keeps
        self._stored: list[CachedParts] = [] if stored is None else stored

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Delete the stored layers, since the quantized model is written; after an error keep them."""
        for parts in self._stored:
            parts.close(delete=kind is None)

    @property
    def graph(self) -> Path:
        """The file of the float graph."""
        return self._graph

    def quantizer(self, algorithm: str) -> Quantizer | None:
        return native_quantizer(algorithm)

    def longest_window(self) -> Tokens:
        """Return the longest window of the calibration text."""
        return max(self._windows, key=len)

    def unread(self, count: int) -> Tokens:
        """Return the last ``count`` tokens of the text; if it is long, no calibration has read them."""
        ahead = len(self._tokenizer.beginning)
        return np.concatenate([window[ahead:] for window in self._read(sys.maxsize)])[-count:]

    def after(self, passes: Sequence[GraphPass]) -> Self:
        """Return the measurements of the model after passes that do not change its results."""
        changed, _ = run(self._model.clone(), list(passes))
        names = " ".join(one.name for one in passes)
        key, scratch = self._source.key, self._scratch / "changed"
        scratch.mkdir()
        source = replace(self._source, key=lambda: f"{key()} {names}", path=None)
        return type(self)(
            source,
            changed,
            self._text,
            scratch,
            tokens=self._tokens,
            progress=self._progress,
            keeps=self._keeps,
            stored=self._stored,
        )

    def kv_pass(self, *, per_tensor: bool) -> QuantizeKVPass:
        """Measure the scales of the KV cache."""

        def measure(tell: Progress) -> Arrays:
            return kv_scales(self._graph, self._windows, context_length=self._context_length, progress=tell)

        scales = self._cached("kv", measure)
        return QuantizeKVPass({name: scale.max() if per_tensor else scale for name, scale in scales.items()})

    def plan(self, forms: WeightFormats, bits: float | None, max_kl: float | None) -> FormatPlan:
        runner = self._weight_inputs(forms)
        found = choices(runner, phase(self._progress, "measure"))
        if bits is not None:
            return spend_bits(found, bits)
        return spend_divergence(found, max_kl or 0.0, runner.divergence)

    def promoted(self, forms: WeightFormats, share: float) -> FormatPlan:
        first = [str(value.name) for value in sensitive_weights(self._model.graph)]
        return promote(self._weight_inputs(forms), share, first, phase(self._progress, "measure"))

    def layers(self, algorithm: str, forms: WeightFormats, promote: Promote | None = None) -> QuantizedLayers:
        if promote is not None:
            forms = forms.promoting(promote(self._model.graph))
        windows = self._read(self._tokens or ROUNDING_TOKENS)
        facts = {"algorithm": algorithm, "forms": repr(forms), **self._facts("layers", windows)}
        return quantize_layers(
            self._model,
            CALIBRATED[algorithm],
            forms,
            windows,
            self._parts(facts),
            context_length=self._context_length,
            arithmetic=native_arithmetic(),
            progress=phase(self._progress, "calibrate"),
        )

    def kept(self, algorithm: str, forms: WeightFormats) -> CachedParts | None:
        if not self._keeps:
            return None
        facts = {"what": "weights", "model": self._source.key()}
        return self._parts({"algorithm": algorithm, "forms": repr(forms), **facts})

    def smoothing(self, *, norms: bool = True) -> dict[str, Floats]:
        """Measure the SmoothQuant factors of the channels in front of layers.

        Args:
            norms: whether to include channels that come from norms, besides those inside of gated MLPs.
        """

        def measure(tell: Progress) -> Arrays:
            return largest_activations(
                self._graph, self._windows, context_length=self._context_length, progress=tell
            )

        return smoothing_factors(self._graph, self._cached("channels", measure), norms=norms)

    def ranges(self, calibrator: str, factors: Mapping[str, Floats]) -> dict[str, float]:
        """Measure the ranges of the inputs of all layers, divided by ``factors`` if there are any."""

        def measure(tell: Progress) -> Arrays:
            histograms = input_histograms(
                self._graph,
                self._windows,
                context_length=self._context_length,
                factors=factors,
                progress=tell,
            )
            return {name: histogram.to_array() for name, histogram in histograms.items()}

        found = self._cached("smooth inputs" if factors else "inputs", measure)
        choose = CALIBRATORS[calibrator]
        return {name: choose(Histogram.from_array(array)) for name, array in found.items()}

    def beyond(self, dtype: ir.DataType) -> list[str]:
        """Return the names of values that exceed the range of a 16-bit dtype.

        Raises:
            UsageError: the model has no tokenizer, so it cannot run on a text.
        """
        if dtype == ir.DataType.BFLOAT16:  # bfloat16 has the range of float32
            return []

        def measure(tell: Progress) -> Arrays:
            largest = largest_magnitudes(
                self._graph, self._windows[:4], context_length=self._context_length, progress=tell
            )
            return {name: np.array(magnitude) for name, magnitude in largest.items()}

        found = self._cached("magnitudes", measure)
        return too_large({name: float(magnitude) for name, magnitude in found.items()}, dtype)

    def sensitive_layers(
        self, max_error: float, rounding: Rounding, factors: Mapping[str, Floats], form: BlockFormat | None
    ) -> tuple[list[str], list[str]]:
        """Find the weights whose matrix products change by more than ``max_error`` when quantized.

        Returns:
            The weights whose inputs must stay float, and those of them that must stay float themselves, since
            ``form`` exceeds the error too.
        """
        longest = max(self._windows, key=len)

        def found(rounding: Rounding, **options: Any) -> list[str]:
            tell = phase(self._progress, "calibrate")
            errors = product_errors(self._graph, longest, rounding, factors=factors, progress=tell, **options)
            return sorted(name for name, error in errors.items() if error > max_error)

        vetoed = found(rounding)
        return vetoed, found(float_inputs, form=form, only=vetoed)

    def _parts(self, facts: Mapping[str, Any]) -> CachedParts:
        parts = CachedParts("layers", facts)
        self._stored.append(parts)
        return parts

    def _weight_inputs(self, forms: WeightFormats) -> WeightInputs:
        step = max(1, len(self._windows) // _PLAN_WINDOWS)
        windows = [window[:_PLAN_WINDOW] for window in self._windows[::step][:_PLAN_WINDOWS]]
        return WeightInputs(self._graph, windows, forms, context_length=self._context_length)

    def _cached(self, what: str, measure: Callable[[Progress], Arrays]) -> dict[str, Any]:
        """Return the result of ``measure`` for this model and text, from the cache if possible."""
        facts = self._facts(what, self._windows)
        return cached_arrays(facts, lambda: measure(phase(self._progress, "calibrate")))

    def _facts(self, what: str, windows: Sequence[Tokens]) -> dict[str, Any]:
        """Return what a result of this model and these windows of text depends on."""
        return {
            "what": what,
            "model": self._source.key(),
            "text": hashlib.sha256(np.concatenate(windows).tobytes()).hexdigest(),
            "windows": [len(window) for window in windows],
            "context_length": self._context_length,
        }

    @cached_property
    def _graph(self) -> Path:
        if self._source.path is not None:
            return self._source.path
        folder = self._scratch / "float"
        folder.mkdir()
        save_model(self._model.clone(), folder / MODEL_FILE)
        return folder / MODEL_FILE

    @cached_property
    def _context_length(self) -> int:
        if self._source.context_length is None:
            raise UsageError(
                f"{self._source.name} does not state its context length: add a {CONFIG_FILE} with "
                f"max_position_embeddings to {self._source.folder}"
            )
        return self._source.context_length

    @cached_property
    def _windows(self) -> list[Tokens]:
        return self._read(self._tokens or READ_TOKENS)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (self._source.folder / TOKENIZER_FILE).is_file():
            raise UsageError(
                f"{self._source.name} has no {TOKENIZER_FILE}, but this quantization first runs the model on "
                f"a text: add the file to {self._source.folder}, or use one of the methods int4-fast, "
                "int8-fast, int8-dynamic and bf16 with default settings, which read no text"
            )
        return Tokenizer(self._source.folder)

    def _read(self, max_tokens: int) -> list[Tokens]:
        if find_input(self._model.graph, ENCODER_STATES) is not None:
            raise UsageError(
                f"this quantization first runs the model on a text, and {self._source.name} writes down what "
                "its encoder hears or sees; choose int8-fast or int4-fast with default settings"
            )
        return calibration_windows(
            self._tokenizer,
            self._text,
            context_length=self._context_length,
            max_tokens=max_tokens,
        )
