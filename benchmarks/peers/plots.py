"""Charts of a comparison: growth with context and batch, and each engine beside the limits of the machine.

The roofline model: a computation of I operations per byte reaches at most min(peak, I * bandwidth)
(Williams, Waterman and Patterson, https://doi.org/10.1145/1498765.1498785).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from measures import Contestant, Figure, Plan, decode_name, prompt_name
from safetensors import safe_open

from carryall.exporter.gguf.file import GgufFile

sys.path.append(str(Path(__file__).resolve().parents[1] / "decoders"))
from charts import lines

_PEAK_SIZE, _PEAK_RUNS = 2048, 5
Points = list[tuple[float, float]]


def write_plots(
    folder: Path,
    model: str,
    figures: Sequence[Figure],
    plan: Plan,
    roofline: Callable[[Callable[[str, str], float | None]], Mapping[str, Points]],
) -> None:
    """Write ``MODEL-context.svg``, ``MODEL-batch.svg`` and ``MODEL-roofline.svg``.

    Args:
        folder: where the files go.
        model: name of the model.
        figures: all measured values.
        plan: what was measured.
        roofline: makes its lines from a function that returns the rate of a measure and an engine.
    """

    def rate(measure: str, engine: str) -> float | None:
        found = [f.value for f in figures if f.measure == measure and f.engine == engine]
        return statistics.median(found) if found else None

    def grown(names: Mapping[float, str]) -> dict[str, Points]:
        engines = dict.fromkeys(figure.engine for figure in figures)
        found = {
            engine: [(x, value) for x, name in names.items() if (value := rate(name, engine))]
            for engine in engines
        }
        return {engine: points for engine, points in found.items() if points}

    charts = {
        "context": (
            grown({length: decode_name(length, batch) for length, batch in plan.decode if batch == 1}),
            "tokens in the cache",
            "decoded tokens a second, batch 1",
        ),
        "batch": (
            grown({batch: decode_name(length, batch) for length, batch in plan.decode if length == 256}),
            "batch",
            "decoded tokens a second, 256 tokens in each cache",
        ),
        "roofline": (roofline(rate), "operations a byte of weights", "operations a second, 10^9"),
    }
    for name, (series, x, y) in charts.items():
        if series:
            chart = lines(f"{model}: {name}", series, x=x, y=y)
            (folder / f"{model}-{name}.svg").write_text(chart, encoding="utf-8")


class Roofline:
    """The limits of the machine and the cost of a model.

    Args:
        source: Hugging Face folder or GGUF file; its number of weights is that of every engine's model.
        contestants: the engines; the files of a model are the bytes that a step reads.
        plan: what was measured.
        bandwidth: bytes a second.
        peak: int8 operations a second.
    """

    def __init__(
        self,
        source: Path,
        contestants: Sequence[Contestant],
        plan: Plan,
        bandwidth: float,
        peak: float,
    ) -> None:
        self._weights = _weights(source)
        self._bytes = {one.name: _bytes(Path(one.model.split(",")[0])) for one in contestants}
        self._plan, self._bandwidth, self._peak = plan, bandwidth, peak

    def __call__(self, rate: Callable[[str, str], float | None]) -> dict[str, Points]:
        """Return the lines; ``rate`` returns tokens a second of a measure and an engine."""
        steps = {
            decode_name(length, batch): batch for length, batch in self._plan.decode if length == 256
        } | {prompt_name(tokens): tokens for tokens in self._plan.prompts}
        found = {
            engine: [
                (2 * self._weights * tokens / size, 2 * self._weights * value / 1e9)
                for name, tokens in steps.items()
                if (value := rate(name, engine))
            ]
            for engine, size in self._bytes.items()
        }
        found = {engine: points for engine, points in found.items() if points}
        if found:
            every = [x for points in found.values() for x, _ in points]
            xs = sorted({min(every), self._peak / self._bandwidth, max(every)})
            found["limit"] = [(x, min(self._peak, x * self._bandwidth) / 1e9) for x in xs]
        return found


def int8_peak() -> float:
    """Return int8 operations a second of onnxruntime's product of matrices of 2,048 x 2,048, best of 5."""
    size, rng = _PEAK_SIZE, np.random.default_rng(0)
    weights = ir.tensor(rng.integers(-127, 127, (size, size), np.int8))
    x = ir.val("x", ir.DataType.UINT8, [size, size])
    product = ir.node("MatMulInteger", [x, ir.Value(name="w", const_value=weights)])
    product.outputs[0].type = ir.TensorType(ir.DataType.INT32)
    graph = ir.Graph(
        [x], product.outputs, nodes=[product], initializers=product.inputs[1:], opset_imports={"": 21}
    )
    made = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(made, providers=["CPUExecutionProvider"])
    feed = {"x": rng.integers(0, 255, (size, size), np.uint8)}
    best = float("inf")
    for _ in range(_PEAK_RUNS):
        start = time.perf_counter()
        session.run(None, feed)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _weights(source: Path) -> int:
    if source.is_file():
        return sum(int(np.prod(tensor.shape)) for tensor in GgufFile(source).tensors.values())
    total = 0
    for path in source.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            total += sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    return total


def _bytes(model: Path) -> int:
    files = [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
