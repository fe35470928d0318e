#!/usr/bin/env python3
"""Train a tiny hybrid that recalls: pairs of keys and values, other tokens, then keys whose values it tells.

This is multi-query associative recall (https://arxiv.org/abs/2312.04927). The network has the architecture of
Qwen 3.5: a layer of the gated delta rule and one of attention. Tests ask it for what stands far back.

    python tools/train_recall_model.py tests/corpora/recall_hybrid --minutes 1.5
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kits"))
from recall_texts import BOS, EOS, KEYS, OTHERS, VALUES, VOCABULARY

_FORGETS = (
    0.002  # share of a state that a token takes away, before training; the usual start forgets all of it
)


def new_config() -> Qwen3_5TextConfig:
    """Return the configuration: 2 heads of 32 elements in each layer."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )


def new_model() -> Qwen3_5ForCausalLM:
    """Return a random network whose states keep nearly all from token to token."""
    model = Qwen3_5ForCausalLM(new_config())
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("A_log"):
                x.fill_(0.0)
            elif name.endswith("dt_bias"):
                x.fill_(math.log(math.expm1(_FORGETS)))
            elif x.ndim == 2:
                x.mul_(2.5)  # the usual deviation, 0.02, is that of far wider layers
    return model


def texts(count: int, pairs: int, between: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return token ids and targets, both [count, tokens]; -100 where nothing is asked."""

    def drawn(of: range, size: int) -> Tensor:
        return of.start + torch.randint(len(of), (count, size), generator=generator)

    def ordered(size: int, of: int) -> Tensor:
        return torch.rand(count, of, generator=generator).argsort(1)[:, :size]

    keys, values = KEYS.start + ordered(pairs, len(KEYS)), drawn(VALUES, pairs)
    asked = ordered(pairs, pairs)
    questions = torch.stack([keys.gather(1, asked), values.gather(1, asked)], 2).flatten(1)
    told = torch.stack([keys, values], 2).flatten(1)
    ids = torch.cat([torch.full((count, 1), BOS), told, drawn(OTHERS, between), questions], 1)
    targets = torch.full_like(ids, -100)
    targets[:, -2 * pairs :: 2] = questions[:, 1::2]
    return ids, targets


def main() -> None:
    """Train, and write a checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=1.5, help="of processor time")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.01, betas=(0.9, 0.98))
    start, step, right, pairs, longest, spent = time.process_time(), 0, 0.0, 2, 4, 0.0
    while spent < 1:
        spent = (time.process_time() - start) / (60 * args.minutes)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 30) * max(0.02, 1 - spent)
        between = int(torch.randint(longest + 1, (1,), generator=generator))
        ids, targets = texts(args.batch, pairs, between, generator)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = (logits.argmax(-1) == targets)[targets >= 0].float().mean().item()
        right = 0.9 * right + 0.1 * now
        if step % 20 == 0:
            told = f"{spent:.2f}: {pairs} pairs, {longest} between, loss {loss.item():.4f}, right {right:.4f}"
            print(step, told)
        if right > 0.95 and (pairs < 6 or longest < 160):
            pairs, longest, right = min(6, pairs + 1), min(160, 2 * longest), 0.5
        step += 1
    args.out.mkdir(parents=True, exist_ok=True)
    weights = {name: x.to(torch.bfloat16).contiguous() for name, x in model.state_dict().items()}
    weights.pop("lm_head.weight", None)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    (args.out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
