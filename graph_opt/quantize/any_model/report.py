"""The report of a quantization: quantized weights, and the errors of layers and outputs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ....records import dataclass
from ....reports import Report, human_bytes
from ...graph.lazy import Array

_MAX_DB = 200.0  # the SNR of equal tensors


@dataclass(frozen=True, slots=True)
class OutputFidelity:
    """The difference between an output of the quantized and of the float model, over all samples.

    Attributes:
        snr: signal-to-noise ratio in dB; 200 for equal outputs.
        cosine: cosine similarity.
        max_error: largest difference, relative to the largest float value.
    """

    snr: float
    cosine: float
    max_error: float


@dataclass(slots=True, kw_only=True)
class GraphQuantizationReport(Report):
    """What was done to one model.

    Attributes:
        method: "int8-static", "int8-dynamic", "fp16" or "bf16".
        samples: description of the calibration samples; None without calibration.
        calibrator: the calibrator of activation ranges, None if there is none.
        layer_errors: by quantized weight, the relative RMS error of its layers' outputs.
        tables: lookup tables stored in int8.
        left_float: by weight, the reason why it was not quantized.
        outputs: fidelity of each float output, on held-out samples if there are enough.
        time: time of a run relative to the float model's, on onnxruntime's CPU provider; None if not
            measured.
        bytes_before: bytes of the original file or weights.
        bytes_after: bytes of the resulting file or weights.
        notes: warnings and remarks.
        path: path of the written model; empty if it was not written.
        seconds: duration of the quantization in seconds.
    """

    method: str
    samples: str | None = None
    calibrator: str | None = None
    layer_errors: dict[str, float] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    left_float: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, OutputFidelity] = field(default_factory=dict)
    time: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    notes: list[str] = field(default_factory=list)
    path: str = ""
    seconds: float = 0.0

    @property
    def worst_output(self) -> OutputFidelity | None:
        """The output with the lowest signal-to-noise ratio, None if no output was compared."""
        return min(self.outputs.values(), key=lambda one: one.snr, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        weights, tables = len(self.layer_errors), len(self.tables)
        rows = [("method", self.method)]
        rows += [("quantized", f"{weights} weights of layers, {tables} tables")] if weights or tables else []
        rows.append(("left float", f"{len(self.left_float)} weights or values"))
        for reason, count in Counter(self.left_float.values()).most_common():
            rows.append(("", f"{count} x {reason}"))
        rows += [("calibrated on", self.samples)] if self.samples is not None else []
        if self.layer_errors:
            name = max(self.layer_errors, key=self.layer_errors.__getitem__)
            rows.append(("largest layer error", f"{100 * self.layer_errors[name]:.2g} % at {name}"))
        for name, one in self.outputs.items():
            error = f"largest error {100 * one.max_error:.2g} % of the largest value"
            rows.append((f"output {name}", f"SNR {one.snr:.1f} dB, cosine {one.cosine:.6f}, {error}"))
        rows += [("time of a run", f"{self.time:.2f} of the float model's on this CPU")] if self.time else []
        rows += [("note", note) for note in self.notes]
        if self.path:
            sizes = f"{human_bytes(self.bytes_before)} -> {human_bytes(self.bytes_after)}"
            rows.append(("written", f"{self.path}, {sizes}, {self.seconds:.1f} s"))
        return rows


def output_fidelity(
    exact: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]]
) -> dict[str, OutputFidelity]:
    """Compare float outputs over samples; outputs of other types or with different shapes are skipped.

    Args:
        exact: outputs of the float model by name, one mapping per sample.
        actual: outputs of the other model by name, one mapping per sample.
    """
    result: dict[str, OutputFidelity] = {}
    for name in exact[0] if exact else ():
        pairs = [(one[name], two[name]) for one, two in zip(exact, actual, strict=True)]
        if all(a.dtype.kind == "f" and a.shape == b.shape for a, b in pairs):
            left, right = (
                np.concatenate([pair[side].reshape(-1) for pair in pairs]).astype(np.float64)
                for side in (0, 1)
            )
            if left.size and np.isfinite(left).all():
                result[name] = _fidelity(left, right)
    return result


def _fidelity(exact: Array, actual: Array) -> OutputFidelity:
    error, energy = float(((exact - actual) ** 2).sum()), float((exact**2).sum())
    snr = _MAX_DB if error == 0 else 10 * float(np.log10(max(energy, 1e-300) / error))
    norms = float(np.linalg.norm(exact) * np.linalg.norm(actual))
    cosine = 1.0 if error == 0 else float(exact @ actual) / max(norms, 1e-300)
    largest = float(np.abs(exact).max())
    return OutputFidelity(snr, cosine, float(np.abs(exact - actual).max()) / max(largest, 1e-30))
