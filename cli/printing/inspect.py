"""Print what ``carryall inspect`` found in a model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..options import human_bytes

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
