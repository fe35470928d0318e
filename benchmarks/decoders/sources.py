"""Check which exporters' graphs reach the canonical form, and count the nodes per layer after lowering.

    python benchmarks/decoders/sources.py CHECKPOINTS TRACES... [--source NAME] [--family NAME] \\
        [--markdown FILE]

CHECKPOINTS holds a folder for each family; each TRACES holds <source>/<family>/**/*.onnx of the same weights.
Every graph goes through the portable passes and the CPU's lowering. A cell has the number of nodes of a layer
(from one attention to the next) if the portable graph is canonical (standard operators, every attention and
norm fused, the contract's caches) and sixteen greedy tokens of two prompts equal those of transformers.
Otherwise it has the reason. If a source has several graphs of a family, the cell has each different result.
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from decoder_run import Decoder

from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

_PROMPTS = (
    [5, 17, 99, 23, 42, 7, 300, 812, 4, 77, 1501, 9, 250, 3000, 61, 18, 7, 7999, 12, 40],
    [1000, 3, 77],
)
_TOKENS = 16
_UNFUSED = {"Softmax", "ReduceMean", "Erf", "TensorScatter"}  # operators that fusions replace


def main() -> None:
    """Command line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--source", action="append", help="only these; may be repeated")
    parser.add_argument("--family", action="append", help="only these; may be repeated")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source, family, path in _graphs(arguments.checkpoints, arguments.traces):
        if arguments.source and source not in arguments.source:
            continue
        if arguments.family and family not in arguments.family:
            continue
        found = _result(path, arguments.checkpoints / family)
        print(source, family, path.name, found, flush=True)
        cells[source, family].append(found)
    text = _table(cells)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)


def _graphs(checkpoints: Path, roots: list[Path]) -> Iterator[tuple[str, str, Path]]:
    families = {folder.name for folder in checkpoints.iterdir() if folder.is_dir()}
    for root in roots:
        for path in sorted(root.rglob("*.onnx")):
            source, family, *variant = path.relative_to(root).parts[:-1]
            if family in families:
                stem = [] if path.stem == "model" else [path.stem.removeprefix("model_")]
                yield " ".join([source, *variant, *stem]), family, path


def _result(path: Path, checkpoint: Path) -> str:
    """Return the number of nodes per layer, or what is wrong with a graph."""
    try:
        model, _ = run(ir.load(path), portable_passes())
        fault = _noncanonical(model.graph)
        lowered, _ = run(model, slot_passes(SlotOptions(context_length=256)))
        with tempfile.TemporaryDirectory() as folder:
            ir.save(lowered, Path(folder, "model.onnx"), external_data="model.onnx.data")
            decoder = Decoder(Path(folder, "model.onnx"), 0)
            tokens = [decoder.generate(prompt, _TOKENS)[0] for prompt in _PROMPTS]
    except Exception as error:  # noqa: BLE001 -- the table shows the failure; other graphs follow
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    if fault is not None:
        return fault
    if tokens != _expected(checkpoint):
        return "other tokens"
    return str(_nodes_per_layer(lowered.graph))


def _noncanonical(graph: ir.Graph) -> str | None:
    """Return why a graph is not canonical, or None."""
    count = Counter(node.op_type for node in graph)
    domains = {node.domain for node in graph} - {""}
    caches = [value for value in graph.inputs if str(value.name).startswith("past_key_values.")]
    if domains:
        return f"left: {', '.join(sorted(domains))}"
    if not caches or 2 * count["Attention"] != len(caches):
        return f"{count['Attention']} attentions for {len(caches) // 2} layers"
    routers = {node.inputs[0] for node in graph if node.op_type == "TopK"}
    unfused = sorted({node.op_type for node in graph if routers.isdisjoint(node.outputs)} & _UNFUSED)
    return f"not fused: {', '.join(unfused)}" if unfused else None


def _nodes_per_layer(graph: ir.Graph) -> int:
    """Return the number of nodes from one attention to the next, including the second."""
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"]
    sizes = sorted(len(_upstream(node)) for node in attentions)
    return sizes[1] - sizes[0]


def _upstream(node: ir.Node) -> set[ir.Node]:
    found: set[ir.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            producers = (value.producer() for value in current.inputs if value is not None)
            waiting += [producer for producer in producers if producer is not None]
    return found


@functools.cache
def _expected(checkpoint: Path) -> list[list[int]]:
    """Return the greedy tokens of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = []
    for prompt in _PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(_TOKENS):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def _table(cells: dict[tuple[str, str], list[str]]) -> str:
    families = sorted({family for _, family in cells})
    lines = [f"| source | {' | '.join(families)} |", f"| --- |{' --- |' * len(families)}"]
    for source in sorted({source for source, _ in cells}):
        found = [sorted(set(cells.get((source, family), ["-"]))) for family in families]
        lines.append(f"| {source} | {' | '.join('; '.join(each) for each in found)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
