"""Check that a package loads in Optimum and generates what transformers generates.

Run it in an environment with optimum-onnx, which carryall does not require:

    python tools/check_optimum.py PACKAGE CHECKPOINT

optimum-onnx 0.1 creates the first, empty cache. For some families (qwen3, smollm3, phi3 with grouped heads)
it uses other sizes than the configured ones; such checkpoints fail in Optimum for every exporter.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoModelForCausalLM

NEW_TOKENS = 16


def main() -> None:
    """Compare Optimum's tokens for the package with transformers' tokens for the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="output folder of `carryall export CHECKPOINT PACKAGE`")
    parser.add_argument("checkpoint", help="the Hugging Face folder of that export")
    arguments = parser.parse_args()
    expected = generate(AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32))
    for use_io_binding in (False, True):
        model = ORTModelForCausalLM.from_pretrained(arguments.package, use_io_binding=use_io_binding)
        if not model.can_use_cache:
            raise SystemExit("Optimum does not recognize the package's KV cache")
        found = generate(model)
        if found != expected:
            raise SystemExit(f"tokens differ (IO binding {use_io_binding}):\n{found}\n{expected}")
        print(f"same {NEW_TOKENS} tokens for each of {len(found)} prompts, IO binding {use_io_binding}")


def generate(model: Any) -> list[list[int]]:
    """Return greedy tokens for two prompts; the second is padded on the left."""
    input_ids = torch.arange(20, 32).reshape(2, 6)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :2] = 0
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
    return tokens


if __name__ == "__main__":
    main()
