"""``carryall inspect``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...errors import GraphError
from ...exporter.config import context_lengths, read_json
from ...exporter.package import Package
from ...exporter.signature import DecoderSignature
from ...graph_opt.graph import graph_facts
from ...runtime.models.graphs import load_graph
from ...runtime.models.model_source import locate_model
from ..options import human_bytes, json_option, model_argument, print_json

LARGEST = 8
_LAYER = re.compile(r"\.\d+\.")


@click.command("inspect")
@model_argument
@json_option
def command(model: str, as_json: bool) -> None:
    """Show operators, weights, KV cache and sizes of a model, without running it.

    It shows the count of each operator, the weights by dtype and the largest weights, their quantization, the
    layers, heads and bytes per token of the KV cache, inputs, outputs, and file sizes. MODEL is a package, an
    ONNX file, or a checkpoint, which is shown as exported.

    \b
    Examples:
        carryall inspect demo
        carryall inspect ./model.onnx --json
    """
    graph, package = load_graph(model)
    facts = describe(model, graph, package)
    if as_json:
        print_json({"model": model, **facts})
    else:
        show(model, facts)


def describe(name: str, model: ir.Model, package: Package | None) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    record = package.record if package else None
    path = locate_model(name)
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    counts = graph_facts.operators(model)
    return {
        "model_type": config.get("model_type"),
        "context_length": context_lengths(config)[0] if config else None,
        "parameters": graph_facts.parameter_count(model),
        "quantization": record.quantization if record else None,
        "passes": list(record.passes) if record else [],
        "kv_cache": _kv_cache(model),
        "opsets": dict(model.opset_imports),
        "nodes": sum(counts.values()),
        "operators": counts,
        "weights": graph_facts.weights_by_type(model),
        "largest": [graph_facts.describe_tensor(t) for t in graph_facts.initializers(model)[:LARGEST]],
        "inputs": [graph_facts.describe_value(value) for value in model.graph.inputs],
        "outputs": [graph_facts.describe_value(value) for value in model.graph.outputs],
        "files": _files(folder) if path.is_dir() else {},
    }


def _kv_cache(model: ir.Model) -> dict[str, Any] | None:
    """Return the sizes of the KV cache, None for a graph without one."""
    try:
        signature = DecoderSignature.of(model)
    except GraphError:
        return None
    return {
        "layers": signature.num_layers,
        "kv_heads": signature.num_kv_heads,
        "head_dim": signature.head_dim,
        "dtype": signature.kv_dtype.name,
        "bytes_per_token": signature.kv_bytes_per_token,
    }


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def show(name: str, facts: dict[str, Any]) -> None:
    """Print the document as tables."""
    console = Console()
    summary = Table(box=None, show_header=False, pad_edge=False)
    for label, text in _summary(facts):
        summary.add_row(Text(label, style="bold"), Text(text))
    console.print(Text(name, style="bold"), summary, "", sep="\n")
    weights = Table("weights", "tensors", "size", box=None, pad_edge=False)
    for dtype, entry in facts["weights"].items():
        weights.add_row(dtype, str(entry["tensors"]), human_bytes(entry["bytes"]))
    largest = Table("largest weights", "type", "shape", "size", box=None, pad_edge=False)
    for tensor in facts["largest"]:
        shape = " x ".join(map(str, tensor["shape"]))
        largest.add_row(Text(tensor["name"]), tensor["dtype"], shape, human_bytes(tensor["bytes"]))
    console.print(weights, "", largest, "", sep="\n")


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("family", facts["model_type"])]
    if facts["parameters"]:
        rows.append(("parameters", f"{facts['parameters'] / 1e6:,.1f} M"))
    if facts["context_length"]:
        rows.append(("context", f"{facts['context_length']:,} tokens"))
    if facts["kv_cache"]:
        cache = facts["kv_cache"]
        heads = (
            f"{cache['layers']} layers x {cache['kv_heads']} heads x {cache['head_dim']}, {cache['dtype']}"
        )
        rows.append(("KV cache", f"{heads}: {human_bytes(cache['bytes_per_token'])} per token"))
    quantization = facts["quantization"]
    rows.append(("quantized", _quantization(quantization) if quantization else "no"))
    rows.append(("passes", ", ".join(facts["passes"]) or "none"))
    rows.append(("opsets", ", ".join(f"{domain or 'ai.onnx'} {v}" for domain, v in facts["opsets"].items())))
    operators = ", ".join(f"{op} {count}" for op, count in facts["operators"].items())
    rows.append(("operators", f"{facts['nodes']} nodes: {operators}"))
    rows += [(way, _signatures(facts[way])) for way in ("inputs", "outputs")]
    if facts["files"]:
        rows.append(
            ("files", ", ".join(f"{name} {human_bytes(size)}" for name, size in facts["files"].items()))
        )
    return [(label, text) for label, text in rows if text]


def _quantization(record: dict[str, Any]) -> str:
    """Return the record as text, without the recipe, which repeats it."""
    return ", ".join(f"{name} {value}" for name, value in record.items() if name != "recipe")


def _signatures(values: list[dict[str, Any]]) -> str:
    """Return the values as text, with one line for the caches of all layers."""
    texts = [f"{value['name']} {value['dtype']} [{', '.join(map(str, value['shape']))}]" for value in values]
    return "\n".join(dict.fromkeys(_LAYER.sub(".N.", text) for text in texts))
