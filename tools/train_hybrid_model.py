#!/usr/bin/env python3
"""Train a small decoder of the gated delta rule and attention, with a head of multi-token prediction.

The network has the architecture of Qwen 3.5. It begins as a copy of a Llama model of train_demo_model.py, as
far as the layers agree (embedding, feed-forward layers, projections of queries, keys and values), and learns
that model's predictions on the same text (distillation). The head learns those of one token later. The delta
rule is computed in chunks (https://arxiv.org/abs/2412.06464).
"""

import argparse
import math
import random
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from demo_text import BOS, EOS, encode, encode_cut, read_sources
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from train_demo_model import EMBED, NORM, Trainer, Weights, held_out_loss, write_model
from train_draft_head import FC, OF_EMBEDDING, OF_HIDDEN, OUT, rms_norm, streams
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

REPOSITORY = Path(__file__).resolve().parents[1]
HEAD_DIM, TAPS, CHUNK = 64, 4, 64
ROTATED, ROPE_THETA, EPS = 16, 1e7, 1e-5
# fmt: off
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FULL = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", *MLP,
)
LINEAR = (
    "input_layernorm", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b",
    "linear_attn.in_proj_a", "linear_attn.conv1d", "linear_attn.norm", "linear_attn.out_proj",
    "post_attention_layernorm", *MLP,
)
# fmt: on


def new_config(args: argparse.Namespace, vocab: int, hidden: int) -> Qwen3_5TextConfig:
    """Return the configuration of a network with layers of the delta rule, each fourth one of attention."""
    return Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=args.ff,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=HEAD_DIM,
        linear_conv_kernel_dim=TAPS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_num_key_heads=args.heads,
        linear_num_value_heads=args.heads,
        max_position_embeddings=args.context,
        rms_norm_eps=EPS,
        rope_parameters={
            "rope_theta": ROPE_THETA,
            "rope_type": "default",
            "partial_rotary_factor": ROTATED / HEAD_DIM,
        },
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        mtp_num_hidden_layers=1,
        architectures=["Qwen3_5ForCausalLM"],
        dtype="bfloat16",
    )


def largest_units(gate: Tensor, up: Tensor, down: Tensor, size: int) -> dict[str, Tensor]:
    """Return a feed-forward layer with the units of the largest weights."""
    scores = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    units = scores.topk(size).indices.sort().values
    return dict(zip(MLP, (gate[units], up[units], down[:, units]), strict=True))


def attention_from(model: Weights, layer: str, heads: int) -> Weights:
    """Return the weights of attention with norms of heads and a gate, which starts at one half."""
    q, k, v, o = (model[f"{layer}self_attn.{name}_proj.weight"] for name in "qkvo")
    gated = torch.stack([q.view(heads, HEAD_DIM, -1), torch.zeros_like(q).view(heads, HEAD_DIM, -1)], 1)
    norm = torch.full((HEAD_DIM,), 1.5)
    weights = {"q_proj": gated.flatten(0, 2), "k_proj": k, "v_proj": v, "o_proj": 2 * o}
    weights |= {"q_norm": norm, "k_norm": norm}
    return {f"self_attn.{name}": weight for name, weight in weights.items()}


def delta_from(model: Weights, layer: str, heads: int, generator: torch.Generator) -> Weights:
    """Return the weights of the delta rule; its queries, keys, values and outputs are those of attention."""
    q, k, v, o = (model[f"{layer}self_attn.{name}_proj.weight"] for name in "qkvo")
    k, v = (w.view(-1, HEAD_DIM, w.shape[1]) for w in (k, v))
    k, v = (w.repeat_interleave(heads // len(w), 0).flatten(0, 1) for w in (k, v))

    def small(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    conv = small(3 * heads * HEAD_DIM, 1, TAPS)
    conv[..., -1] += 1.0
    rates = torch.linspace(math.log(0.05), math.log(2.0), heads)
    weights = {
        "in_proj_qkv": torch.cat([q, k, v]),
        "in_proj_z": small(heads * HEAD_DIM, q.shape[1]) * 2,
        "in_proj_b": small(heads, q.shape[1]),
        "in_proj_a": small(heads, q.shape[1]),
        "conv1d": conv,
        "norm": torch.ones(HEAD_DIM),
        "out_proj": o,
        "A_log": rates,
        "dt_bias": torch.full((heads,), -2.0),
    }
    return {f"linear_attn.{name}": weight for name, weight in weights.items()}


def new_weights(model: Weights, config: Qwen3_5TextConfig, seed: int) -> Weights:
    """Return the first weights. Norms are factors here, not differences from 1."""
    generator = torch.Generator().manual_seed(seed)
    heads, size = config.num_attention_heads, config.intermediate_size
    weights = {EMBED: model[EMBED], NORM: model[NORM]}

    def layer(kind: str, source: int, name: str) -> None:
        old = f"model.layers.{source}."
        parts = attention_from(model, old, heads)
        if kind == "linear_attention":
            parts = delta_from(model, old, heads, generator)
        parts |= largest_units(*(model[f"{old}{each}.weight"] for each in MLP), size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            parts[norm] = model[f"{old}{norm}.weight"]
        for part, weight in parts.items():
            weights[f"{name}{part}{'' if part.endswith(('A_log', 'dt_bias')) else '.weight'}"] = weight

    for i, kind in enumerate(config.layer_types):
        layer(kind, i, f"model.layers.{i}.")
    layer("full_attention", config.num_hidden_layers - 1, "mtp.layers.0.")
    ones, eye = torch.ones(config.hidden_size), torch.eye(config.hidden_size)
    weights |= {FC: torch.cat([eye, eye], 1) / 2, OUT: model[NORM], OF_HIDDEN: ones, OF_EMBEDDING: ones}
    return {name: weight.float().clone() for name, weight in weights.items()}


def is_norm(name: str) -> bool:
    """Whether checkpoints have the norm's difference from 1; the gated norm of the delta rule is a factor."""
    return ("norm" in name.split(".")[-2] or "norm_" in name) and ".linear_attn." not in name


def stored(weights: Weights) -> Weights:
    """Return the weights as checkpoints have them."""
    return {name: weight - float(is_norm(name)) for name, weight in weights.items()}


def as_factors(weights: Weights) -> Weights:
    """Return a checkpoint's weights as they are trained."""
    return {name: weight.float() + float(is_norm(name)) for name, weight in weights.items()}


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embedding to the first channels of (..., positions, head dim)."""
    half = ROTATED // 2
    angles = torch.arange(x.shape[-2])[:, None] * ROPE_THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)
    turned = x[..., :ROTATED]
    return torch.cat([turned * cos + turned.roll(half, -1) * sin, x[..., ROTATED:]], -1)


def feed_forward(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the stream behind a feed-forward layer."""
    h = rms_norm(x, norm)
    return x + functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)


def full_layer(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Run a layer of attention; its weights are in the order of FULL."""
    norm, q, k, v, o, q_norm, k_norm, *mlp = weights
    b, n, _ = x.shape
    h = rms_norm(x, norm)
    queries, gate = functional.linear(h, q).view(b, n, -1, 2, HEAD_DIM).unbind(3)
    keys, values = (functional.linear(h, w).view(b, n, -1, HEAD_DIM) for w in (k, v))
    queries, keys = rms_norm(queries, q_norm), rms_norm(keys, k_norm)
    mixed = functional.scaled_dot_product_attention(
        *(rotate(part.transpose(1, 2)) for part in (queries, keys)),
        values.transpose(1, 2),
        is_causal=True,
        enable_gqa=True,
    )
    out = mixed.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid()
    return feed_forward(x + functional.linear(out, o), *mlp)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the gated delta rule, in chunks.

    Args:
        q: queries [batch, head, position, dim]. Positions are a multiple of CHUNK.
        k: keys, of the same shape.
        v: values, of the same shape.
        decay: logarithms of the decay [batch, head, position].
        beta: how much of an error is learned, of the same shape.
    """
    q, k, v = (part.unflatten(2, (-1, CHUNK)) for part in (q, k, v))
    total, beta = decay.unflatten(2, (-1, CHUNK)).cumsum(-1), beta.unflatten(2, (-1, CHUNK))[..., None]
    fades = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    errors = (beta * (k @ k.transpose(-1, -2)) * fades).tril(-1)
    right = torch.cat([beta * v, beta * total.exp()[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(errors + torch.eye(CHUNK), right, upper=False, unitriangular=True)
    values, keys = solved.split(v.shape[-1], -1)
    scores = (q @ k.transpose(-1, -2)) * fades
    faded = q * total.exp()[..., None]
    last = total[..., -1:]
    left = k * (last - total).exp()[..., None]
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for chunk in range(q.shape[2]):
        new = values[:, :, chunk] - keys[:, :, chunk] @ state
        out.append(faded[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = state * last[:, :, chunk, :, None].exp() + left[:, :, chunk].transpose(-1, -2) @ new
    return torch.cat(out, 2)


def linear_layer(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Run a layer of the delta rule; its weights are in the order of LINEAR, then A_log and dt_bias."""
    norm, qkv, z, b, a, conv, out_norm, o, *mlp, rates, bias = weights
    n = x.shape[1]
    h = rms_norm(x, norm)
    mixed = functional.pad(functional.linear(h, qkv), (0, 0, TAPS - 1, 0))
    mixed = functional.silu(sum(mixed[:, tap : tap + n] * conv[:, 0, tap] for tap in range(TAPS)))
    q, k, v = (part.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for part in mixed.chunk(3, -1))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    decay = -rates.exp() * functional.softplus(functional.linear(h, a) + bias)
    beta = functional.linear(h, b).sigmoid()
    out = delta_rule(q * HEAD_DIM**-0.5, k, v, decay.transpose(1, 2), beta.transpose(1, 2))
    gate = functional.silu(functional.linear(h, z))
    out = rms_norm(out.transpose(1, 2), out_norm).flatten(2) * gate
    return feed_forward(x + functional.linear(out, o), *mlp)


class HybridTrainer(Trainer):
    """Training of the hybrid network and its head by the predictions of a Llama model."""

    def __init__(
        self, weights: Weights, teacher: Weights, config: Qwen3_5TextConfig, args: argparse.Namespace
    ) -> None:
        self.right = 0.0
        self.config, self.known = config, {name: weight.float() for name, weight in teacher.items()}
        super().__init__(weights, None, args)
        compiled: Callable[..., Callable[..., Tensor]] = (lambda f: f) if args.no_compile else torch.compile
        self.full, self.linear = compiled(full_layer), compiled(linear_layer)

    def part(self, prefix: str, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Return the weights of a layer."""
        return tuple(self.weights[f"{prefix}{name}.weight"] for name in names)

    def stream(self, tokens: Tensor) -> Tensor:
        """Return the stream behind the last layer."""
        x = functional.embedding(tokens, self.weights[EMBED])
        for i, kind in enumerate(self.config.layer_types):
            prefix = f"model.layers.{i}."
            if kind == "full_attention":
                x = self.full(x, self.part(prefix, FULL))
            else:
                rates = (self.weights[f"{prefix}linear_attn.{name}"] for name in ("A_log", "dt_bias"))
                x = self.linear(x, (*self.part(prefix, LINEAR), *rates))
        return x

    def head(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the head's stream, from that of the model and the tokens behind each position."""
        weights = self.weights
        states = rms_norm(rms_norm(x, weights[NORM]), weights[OF_HIDDEN])
        embedded = rms_norm(functional.embedding(tokens, weights[EMBED]), weights[OF_EMBEDDING])
        both = functional.linear(torch.cat([embedded, states], -1), weights[FC])
        return self.full(both, self.part("mtp.layers.0.", FULL))

    def gradients(self, tokens: Tensor, scored: Tensor | None = None) -> tuple[float, tuple[Tensor, ...]]:
        """Return the loss of the model's predictions on some windows, and the gradients of all losses."""
        inputs, weights, share = tokens[:, :-1].contiguous(), self.weights, self.args.head_share
        with torch.no_grad():
            x = rms_norm(streams(self.known, inputs)[-1], self.known[NORM])
            wanted = functional.linear(x, self.known[EMBED]).softmax(-1)
        x = self.stream(inputs)
        logits = functional.linear(rms_norm(x, weights[NORM]), weights[EMBED]).flatten(0, 1)
        plain = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        both = 0.75 * functional.cross_entropy(logits, wanted.flatten(0, 1)) + 0.25 * plain
        if share:
            # The head must not change the model, whose embedding it shares.
            head = rms_norm(self.head(x.detach(), tokens[:, 1:]), weights[OUT])[:, :-1]
            guesses = functional.linear(head, weights[EMBED].detach()).flatten(0, 1)
            targets = wanted[:, 1:].flatten(0, 1)
            both = both + share * functional.cross_entropy(guesses, targets)
            self.right = (guesses.argmax(-1) == targets.argmax(-1)).float().mean().item()
        gradients = torch.autograd.grad(
            both, list(weights.values()), allow_unused=not share, materialize_grads=not share
        )
        return plain.item(), gradients


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add(
        "--teacher",
        type=Path,
        default=REPOSITORY / "exporter/demo/pycoder",
        help="Llama model to begin with and to learn from (default %(default)s)",
    )
    add("--init", type=Path, help="folder of an earlier run to train further")
    add("--minutes", type=float, default=70, help="time to train for (default %(default)s)")
    add("--layers", type=int, default=8, help="layers (default %(default)s)")
    add("--heads", type=int, default=4, help="query heads (default %(default)s)")
    add("--kv-heads", type=int, default=2, help="key/value heads of attention (default %(default)s)")
    add("--ff", type=int, default=512, help="feed-forward size (default %(default)s)")
    add("--context", type=int, default=131_072, help="context length to state (default %(default)s)")
    add("--window", type=int, default=512, help="tokens per training window (default %(default)s)")
    add("--batch", type=int, default=8, help="windows per step (default %(default)s)")
    add("--micro", type=int, default=4, help="windows at a time (default %(default)s)")
    add(
        "--repeat", type=int, default=5, help="uses per epoch of files other than tests (default %(default)s)"
    )
    add(
        "--cut", type=float, default=0.02, help="fraction of lines to split the text at (default %(default)s)"
    )
    add("--lr", type=float, default=2e-3, help="full learning rate (default %(default)s)")
    add("--warmup", type=int, default=50, help="steps of the rising learning rate (default %(default)s)")
    add("--decay", type=float, default=0.7, help="part of the time with a falling rate (default %(default)s)")
    add("--head-share", type=float, default=0.3, help="weight of the head's loss (default %(default)s)")
    add("--max-steps", type=int, default=-1, help="maximum number of steps, for tests (default: no limit)")
    add("--max-files", type=int, help="maximum number of files of each kind, for tests (default: all)")
    add("--save-every", type=float, default=5, help="minutes between checkpoints (default %(default)s)")
    add("--threads", type=int, default=1, help="cores to train on (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and order (default %(default)s)")
    add("--no-compile", action="store_true", help="do not use torch.compile, which needs a C++ compiler")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train a model, write it and measure its held-out loss."""
    args = parse(argv)
    held, library, others = (texts[: args.max_files] for texts in read_sources())
    tokenizer = Tokenizer.from_file(str(args.teacher / "tokenizer.json"))
    teacher = load_file(args.teacher / "model.safetensors")
    config = new_config(args, tokenizer.get_vocab_size(), teacher[EMBED].shape[1])
    weights = new_weights(teacher, config, args.seed)
    if args.init:
        weights = as_factors(load_file(args.init / "model.safetensors"))
    print(f"{sum(weight.numel() for weight in weights.values()) / 1e6:.2f} M parameters", flush=True)
    rng = random.Random(args.seed)
    parts = (encode_cut(tokenizer, texts, args.cut, rng) for texts in (library, others))
    files = args.repeat * next(parts) + next(parts)
    trainer = HybridTrainer(weights, teacher, config, args)

    def save() -> None:
        write_model(args.out, config, stored(trainer.weights), tokenizer)
        print(f"likeliest token of the head is the teacher's: {trainer.right:.3f}", flush=True)

    began = time.monotonic()
    steps = trainer.run(files, save)
    save()
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    loss = held_out_loss(model, encode(tokenizer, held))
    print(
        f"{(time.monotonic() - began) / 60:.0f} minutes, {steps} steps, "
        f"{steps * args.batch * args.window / 1e6:.1f} M tokens; "
        f"held-out loss {loss:.4f} (perplexity {math.exp(loss):.3f}), "
        f"by: train_hybrid_model.py {shlex.join(argv or sys.argv[1:])}"
    )


if __name__ == "__main__":
    main()
