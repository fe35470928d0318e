"""Optimizer league: what each optimizer makes of decoder traces, as a table.

    python benchmarks/league.py TRACES [--family llama] [--exporter optimum] [--optimizer ours] [--json]

TRACES holds <exporter>/<family>/**/*.onnx. A row says how many nodes are left (constants not counted), which
fused operators there are, whether the results equal the original's in onnxruntime on a prefill, a decode step
and a step of several tokens, and the seconds it took. Optimizers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

Feed = dict[str, npt.NDArray[np.generic]]
_ATTENTION = ("Attention", "GroupQueryAttention", "MultiHeadAttention")
_NORM = (
    "RMSNormalization",
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
)
_STEPS = ((0, 9), (6, 1), (5, 4))  # cached tokens, new tokens
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer on one trace."""

    trace: str
    optimizer: str
    nodes: int
    attention: int
    norms: int
    rotary: int
    error: float | None
    seconds: float
    failure: str = ""


def onnxslim(source: Path, target: Path) -> None:
    """Run onnxslim."""
    import onnxslim as library  # type: ignore[import-not-found]

    onnx.save(library.slim(onnx.load(source)), target)


def onnxsim(source: Path, target: Path) -> None:
    """Run onnx-simplifier."""
    import onnxsim as library  # type: ignore[import-not-found]

    onnx.save(library.simplify(onnx.load(source))[0], target)


def onnxscript(source: Path, target: Path) -> None:
    """Run onnxscript's optimizer."""
    from onnxscript import optimizer

    model = ir.load(source)
    optimizer.optimize(model)
    ir.save(model, target)


def ort_fusions(source: Path, target: Path) -> None:
    """Run onnxscript's optimizer and its fusions for onnxruntime."""
    from onnxscript import optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model = ir.load(source)
    optimizer.optimize(model)
    ir.save(optimize_for_ort(model)[0], target)


def ort_transformers(source: Path, target: Path) -> None:
    """Run onnxruntime.transformers."""
    from onnxruntime.transformers import optimizer

    made = optimizer.optimize_model(str(source), model_type="gpt2", opt_level=1)
    made.save_model_to_file(str(target))


def ort_all(source: Path, target: Path) -> None:
    """Let onnxruntime optimize while it loads, at its highest level."""
    options = _options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def ours(source: Path, target: Path) -> None:
    """Run the canonical passes of carryall."""
    from carryall.graph_opt.canonical import canonical_passes
    from carryall.graph_opt.pipeline import run

    ir.save(run(ir.load(source), canonical_passes())[0], target)


def ours_cpu(source: Path, target: Path) -> None:
    """Run the canonical passes, then those of the CPU's slots."""
    from carryall.graph_opt.canonical import canonical_passes
    from carryall.graph_opt.lower.slots import SlotOptions, slot_passes
    from carryall.graph_opt.pipeline import run

    passes = [*canonical_passes(), *slot_passes(SlotOptions(context_length=64))]
    ir.save(run(ir.load(source), passes)[0], target)


OPTIMIZERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "onnxslim": ("onnxslim", onnxslim),
    "onnxsim": ("onnxsim", onnxsim),
    "onnxscript": ("onnxscript", onnxscript),
    "ort_fusions": ("onnxscript", ort_fusions),
    "ort_transformers": ("onnxruntime", ort_transformers),
    "ort_all": ("onnxruntime", ort_all),
    "ours": ("carryall", ours),
    "ours_cpu": ("carryall", ours_cpu),
}


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    return options


def count(model: Path) -> Counter[str]:
    """Count the operators of a model, constants left out."""
    nodes = onnx.load(model, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.op_type != "Constant")


def _feed(session: ort.InferenceSession, past: int, new: int) -> Feed:
    rng = np.random.default_rng(past)
    total = past + new
    feed: Feed = {}
    for value in session.get_inputs():
        if value.name == "input_ids":
            feed[value.name] = rng.integers(0, 1000, (2, new))
        elif value.name == "attention_mask":
            feed[value.name] = np.ones((2, total), np.int64)
        elif value.name == "position_ids":
            feed[value.name] = np.tile(np.arange(past, total), (2, 1))
        else:
            shape = (2, value.shape[1], past, value.shape[3])
            feed[value.name] = rng.standard_normal(shape).astype(np.float32)
    return feed


def largest_error(source: Path, target: Path) -> float | None:
    """Return the largest difference of any output, or None where the inputs mean something else now."""
    before, after = (ort.InferenceSession(path, _options()) for path in (source, target))
    if any(value.name == "seqlens_k" for value in after.get_inputs()):
        return None
    names = [value.name for value in before.get_outputs()]
    error = 0.0
    for past, new in _STEPS:
        feed = _feed(before, past, new)
        needed = _feed(after, past, new)
        given = {name: feed.get(name, array) for name, array in needed.items()}
        for left, right in zip(before.run(names, feed), after.run(names, given), strict=True):
            error = max(error, float(np.abs(left - right).max()))
    return error


def measure(trace: str, source: Path, optimizer: str) -> Row:
    """Run one optimizer on one trace."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "model.onnx")
        start = time.perf_counter()
        try:
            OPTIMIZERS[optimizer][1](source, target)
            seconds = time.perf_counter() - start
            found = count(target)
            error = largest_error(source, target)
        except Exception as failure:  # noqa: BLE001 -- other optimizers fail in any way; the table says so
            text = f"{type(failure).__name__}: {failure}".splitlines()[0][:80]
            return Row(trace, optimizer, 0, 0, 0, 0, None, time.perf_counter() - start, text)
    attention, norms = (sum(found[name] for name in names) for names in (_ATTENTION, _NORM))
    return Row(trace, optimizer, found.total(), attention, norms, found["RotaryEmbedding"], error, seconds)


def traces(root: Path, exporters: list[str], families: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of every chosen trace."""
    for path in sorted(root.glob("*/*/**/*.onnx")):
        exporter, family, *_ = path.relative_to(root).parts
        if (not exporters or exporter in exporters) and (not families or family in families):
            yield str(path.relative_to(root).with_suffix("")), path


def show(row: Row) -> str:
    """Return a row as text."""
    if row.failure:
        return f"{row.trace:32} {row.optimizer:17} {row.failure}"
    if row.error is None:
        verdict = "other inputs"
    else:
        verdict = "right" if row.error < _TOLERANCE else f"WRONG by {row.error:.1e}"
    counts = f"{row.nodes:6} {row.attention:9} {row.norms:6} {row.rotary:7}"
    return f"{row.trace:32} {row.optimizer:17} {counts} {row.seconds:8.2f}  {verdict}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--exporter", nargs="+", default=[])
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--optimizer", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    chosen = [name for name in arguments.optimizer if importlib.util.find_spec(OPTIMIZERS[name][0])]
    for name in sorted(set(arguments.optimizer) - set(chosen)):
        print(f"{name}: {OPTIMIZERS[name][0]} is not installed", file=sys.stderr)
    rows: list[Row] = []
    if not arguments.json:
        counts = f"{'nodes':>6} {'attention':>9} {'norms':>6} {'rotary':>7}"
        print(f"{'trace':32} {'optimizer':17} {counts} {'seconds':>8}")
    for trace, path in traces(arguments.traces, arguments.exporter, arguments.family):
        for name in chosen:
            rows.append(measure(trace, path, name))
            if not arguments.json:
                print(show(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
