"""Quantize a Hugging Face folder to int4 weights for vLLM with its own tool, LLM Compressor.

    python quantize_vllm.py CHECKPOINT OUT GROUP_SIZE

The scheme is the tool's W4A16 with another size of the groups: symmetric, without a calibration text, the
embedding and the head stay in bfloat16.
"""

from __future__ import annotations

import sys

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

source, target, group_size = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
weights = QuantizationArgs(
    num_bits=4, type="int", symmetric=True, strategy="group", group_size=int(group_size)
)
scheme = QuantizationScheme(targets=["Linear"], weights=weights)
oneshot(model=model, recipe=QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]))
model.save_pretrained(target, save_compressed=True)
