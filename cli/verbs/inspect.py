"""``carryall inspect``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...errors import GraphError
from ...exporter.facts import GraphFacts
from ...exporter.package import Package
from ...exporter.package_record import PackageRecord
from ...exporter.signature import DecoderSignature
from ...graph_opt.graph import graph_facts
from ...runtime.api.load_encoder import encoder_folder, folder_of_file, model_file, prepared_encoder
from ...runtime.models.context import optional_config, stated_lengths
from ...runtime.models.find import find_model, side_folder
from ...runtime.models.graphs import load_graph, model_place, stored_quantization
from ...runtime.text.chat_template import ChatTemplate
from ...runtime.text.parsers.registry import AnswerFormats
from ...runtime.text.tokenizer import TOKENIZER_FILE, Tokenizer
from ..options import human_bytes, json_option, model_argument, print_json

_LAYER = re.compile(r"\.\d+\.")


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
        sizes = f"{_heads(cache['heads_by_layer'])}, {cache['dtype']}"
        rows.append(("KV cache", f"{sizes}: {human_bytes(cache['bytes_per_token'])} per token"))
    rows.append(("quantized", _quantization(facts)))
    rows.append(("passes", ", ".join(facts["passes"]) or "none"))
    rows.append(("opsets", ", ".join(f"{domain or 'ai.onnx'} {v}" for domain, v in facts["opsets"].items())))
    operators = ", ".join(f"{op} {count}" for op, count in facts["operators"].items())
    rows.append(("operators", f"{facts['nodes']} nodes: {operators}"))
    rows += [(way, _signatures(facts[way])) for way in ("inputs", "outputs")]
    rows.append(("texts", facts["texts"] or ""))
    if (answers := facts["answers"]) is not None:
        rows.append(("thought", " ... ".join(answers["thought"] or ())))
        rows.append(("tool call", answers["call"] or "not known"))
        rows.append(("not derived", "\n".join(answers["notes"])))
    if facts["files"]:
        rows.append(
            ("files", ", ".join(f"{name} {human_bytes(size)}" for name, size in facts["files"].items()))
        )
    return [(label, text) for label, text in rows if text]


def _heads(by_layer: list[list[int]]) -> str:
    counts = Counter(map(tuple, by_layer))
    return " + ".join(
        f"{layers} layer{'s' * (layers > 1)} x {heads} heads x {size}"
        for (heads, size), layers in counts.items()
    )


def _quantization(facts: dict[str, Any]) -> str:
    """Return the record as text, without the recipe, which repeats it; graphs of other tools have none."""
    if facts["quantization"] is None:
        return "yes, without a record of the method" if facts["quantized_weights"] else "no"
    record = {name: value for name, value in facts["quantization"].items() if name != "recipe"}
    return ", ".join(f"{name} {_brief(value)}" for name, value in record.items())


def _brief(value: Any) -> str:
    """Return a value of the record as text, with one name for the weights of all layers."""
    if isinstance(value, dict):
        return f"({', '.join(f'{name} {_brief(one)}' for name, one in value.items())})"
    if not isinstance(value, list):
        return str(value)
    counts = Counter(_LAYER.sub(".N.", str(one)) for one in value)
    return " + ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _signatures(values: list[dict[str, Any]]) -> str:
    """Return the values as text, with one line for the caches of all layers."""
    texts = [f"{value['name']} {value['dtype'] or 'no tensor'}{_shape(value['shape'])}" for value in values]
    return "\n".join(dict.fromkeys(_LAYER.sub(".N.", text) for text in texts))


def _shape(sizes: list[Any] | None) -> str:
    return "" if sizes is None else f" [{', '.join(map(str, sizes))}]"


LARGEST = 8


@click.command("inspect")
@model_argument
@json_option
def command(model: str, as_json: bool) -> None:
    """Show operators, weights, KV cache and sizes of a model, without running it.

    It shows the count of each operator, the weights by dtype and the largest weights, their quantization, the
    layers, heads and bytes per token of the KV cache, inputs, outputs, how the chat template writes thoughts
    and tool calls, and file sizes. Of an encoder it says whether the CPU runs its texts without padding, or
    why not. MODEL is a package, an ONNX file, or a checkpoint, which is shown as exported.

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
    quantization = record.quantization if record else stored_quantization(name)
    path, folder = find_model(name), side_folder(model_place(name))
    config = optional_config(folder)
    counts = graph_facts.operators(model)
    return {
        "model_type": config.get("model_type"),
        "context_length": _context_length(record, config, model),
        "parameters": graph_facts.parameter_count(model),
        "quantization": quantization,
        "quantized_weights": graph_facts.has_quantized_weights(model.graph),
        "passes": list(record.passes) if record else [],
        "kv_cache": _kv_cache(model, config.get("head_dim")),
        "opsets": dict(model.opset_imports),
        "nodes": sum(counts.values()),
        "operators": counts,
        "weights": graph_facts.weights_by_type(model),
        "largest": [graph_facts.describe_tensor(t) for t in graph_facts.initializers(model)[:LARGEST]],
        "inputs": [graph_facts.describe_value(value) for value in model.graph.inputs],
        "outputs": [graph_facts.describe_value(value) for value in model.graph.outputs],
        "texts": _texts(path),
        "answers": _answers(folder),
        "files": _files(path) if path.is_dir() else {path.name: path.stat().st_size},
    }


def _texts(path: Path) -> str | None:
    """Return how the CPU runs the texts of an encoder, or why it pads them; None for another model."""
    from ...providers import get_provider  # onnxruntime, and what encoders need
    from ...runtime.api.token_batches import stated_length
    from ...runtime.models.text_graph import text_graph

    folder = encoder_folder(path if path.is_dir() else folder_of_file(path))
    file = None if folder is None else path if path.is_file() else model_file(prepared_encoder(folder))
    if folder is None or file is None:
        return None
    graph = text_graph(file, get_provider("cpu"), stated_length(folder))
    return "without padding" if isinstance(graph, Path) else f"padded: {graph.reason}"


def _answers(folder: Path) -> dict[str, Any] | None:
    """Return how the chat template writes thoughts and calls; None without a template."""
    tokenizer = Tokenizer(folder) if (folder / TOKENIZER_FILE).is_file() else None
    template = ChatTemplate.from_folder(folder, tokenizer.special_tokens if tokenizer else {})
    if not template.names:
        return None
    stated = tokenizer.config.get("response_template") if tokenizer else None
    return AnswerFormats(template, None, stated).derived(None, with_tools=True).document()


def _context_length(record: PackageRecord | None, config: dict[str, Any], model: ir.Model) -> int | None:
    if record is not None:
        return record.context_length
    found = stated_lengths(config, GraphFacts.of(model))
    return None if found is None else found.longest


def _kv_cache(model: ir.Model, head_dim: object) -> dict[str, Any] | None:
    """Return the sizes of the KV cache, None without one; ``head_dim`` counts if the graph leaves it open."""
    try:
        signature = DecoderSignature.of(model, head_dim=head_dim if isinstance(head_dim, int) else None)
    except GraphError:
        return None
    return {
        "layers": signature.num_layers,
        "kv_heads": signature.num_kv_heads,
        "head_dim": signature.head_dim,
        "heads_by_layer": [list(sizes) for sizes in signature.caches],
        "dtype": signature.kv_dtype.name,
        "bytes_per_token": signature.kv_bytes_per_token,
    }


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
