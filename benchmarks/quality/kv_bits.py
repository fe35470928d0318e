"""What a KV cache of fewer bits costs: KL divergence from float KV, with a GGUF file's weights as floats.

    python benchmarks/quality/kv_bits.py MODEL.gguf TEXT... --tokens 192

Needs torch, transformers and gguf. Keys and values of each token and head are rounded behind the rope, keys
(or both) after a Walsh-Hadamard transform, then attention is computed in floats over whole texts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Change = Callable[[Any], Any]
GROUP = 32


def hadamard(size: int) -> Any:
    """Return the orthonormal Walsh-Hadamard matrix [size, size]; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rounded(bits: int, *, rotate: bool, group: int | None = None, minima: bool = False) -> Change:
    """Return the function that rounds [..., size] in groups, of a whole head by default."""

    def change(x: Any) -> Any:
        size = x.shape[-1]
        turned = x @ hadamard(size) if rotate else x
        groups = turned.reshape(*x.shape[:-1], -1, group or size)
        lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        if minima:
            scale = (highest - lowest).clamp(min=1e-9) / (2**bits - 1)
            levels = ((groups - lowest) / scale).round() * scale + lowest
        else:
            scale = torch.maximum(highest, -lowest).clamp(min=1e-9) / (2 ** (bits - 1) - 1)
            levels = (groups / scale).round() * scale
        levels = levels.reshape(x.shape)
        return levels @ hadamard(size).T if rotate else levels

    return change


INT8 = (rounded(8, rotate=True), rounded(8, rotate=False))  # carryall's cache
FORMS: dict[str, tuple[Change, Change]] = {
    "int8": INT8,
    "int6 rotated, a head": (rounded(6, rotate=True, minima=True),) * 2,
    "int4, groups of 32": (rounded(4, rotate=False, group=GROUP, minima=True),) * 2,
    "int4 rotated, a head": (rounded(4, rotate=True, minima=True),) * 2,
    "int4 rotated, groups of 32": (rounded(4, rotate=True, group=GROUP, minima=True),) * 2,
    "int8 keys, int4 rotated values, groups of 32": (
        INT8[0],
        rounded(4, rotate=True, group=GROUP, minima=True),
    ),
}


def main() -> None:
    """Print the divergence of each form, and its ratio to that of int8."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=192, help="of each text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    forms: list[tuple[Change, Change]] = []  # the form of the run, none for floats

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        for keys, values in forms:
            key, value = keys(key), values(value)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("rounded", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    folder, name = arguments.model.parent, arguments.model.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval().set_attn_implementation("rounded")
    prompts = [
        torch.tensor([tokenizer(path.read_text())["input_ids"][: arguments.tokens]])
        for path in arguments.texts
    ]

    def logprobs() -> list[Any]:
        with torch.inference_mode():
            return [model(prompt).logits[0].log_softmax(-1) for prompt in prompts]

    wanted, lost = logprobs(), {}
    for form, changes in FORMS.items():
        forms[:] = [changes]
        pairs = zip(wanted, logprobs(), strict=True)
        lost[form] = sum(float((a.exp() * (a - b)).sum(-1).mean()) for a, b in pairs) / len(prompts)
        print(f"{form}: KL {lost[form]:.5f}, {lost[form] / lost['int8']:.1f} times int8", flush=True)


if __name__ == "__main__":
    main()
