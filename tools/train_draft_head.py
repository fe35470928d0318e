#!/usr/bin/env python3
"""Train a head that predicts the token after the next one of a demo model, for speculative decoding.

The head is the module ``mtp`` of Qwen 3.5 with layers of the model's own kind. Embedding and output head are
the model's. The model stays as it is; the head learns its predictions (distillation), in its first step from
the model's hidden states and in later ones from its own, as it is used.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from demo_text import batches, encode_cut, read_sources
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from train_demo_model import EMBED, HEAD_DIM, LAYER, NORM, NORM_EPS, ROPE_THETA, Trainer, Weights

FC, OUT, OF_HIDDEN, OF_EMBEDDING = (
    f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
)
CONFIG = '{\n  "model_type": "mtp",\n  "mtp_num_hidden_layers": 2\n}\n'


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize in fp32: products in bf16 are slow on processors without instructions for them."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * weight


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embedding to (..., positions, head dim)."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[-2])[:, None] * ROPE_THETA ** (-torch.arange(half) / half)
    return x * angles.cos().repeat(1, 2) + x.roll(half, -1) * torch.cat([-angles.sin(), angles.sin()], 1)


def decoder_layer(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Run one layer; its weights are in the order of LAYER."""
    norm1, q, k, v, o, norm2, gate, up, down = weights
    h = rms_norm(x, norm1)
    q, k, v = (functional.linear(h, w).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (q, k, v))
    mixed = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    x = x + functional.linear(mixed.transpose(1, 2).flatten(2), o)
    h = rms_norm(x, norm2)
    return x + functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)


def streams(model: Weights, tokens: Tensor) -> list[Tensor]:
    """Return the residual stream in front of each layer of the model, and behind the last."""
    x = [functional.embedding(tokens, model[EMBED])]
    for i in range(sum(name.endswith("q_proj.weight") for name in model)):
        x.append(decoder_layer(x[-1], tuple(model[f"model.layers.{i}.{name}.weight"] for name in LAYER)))
    return x


@torch.no_grad()
def new_head(model: Weights, layers: list[int], tokens: Tensor) -> Weights:
    """Return the head's first weights.

    They are copies of some of the model's layers, behind the projection that comes closest to the stream in
    front of the first of these (least squares on some text).
    """
    size = len(model[NORM])
    head = {
        f"mtp.layers.{i}.{name}.weight": model[f"model.layers.{layer}.{name}.weight"]
        for i, layer in enumerate(layers)
        for name in LAYER
    }
    undone = model[NORM].square().mean().sqrt() / model[NORM]  # the model's last norm
    head |= {OF_HIDDEN: undone, OF_EMBEDDING: torch.ones(size), OUT: model[NORM]}
    square, product = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
    for part in tokens.split(4):
        stream = streams(model, part)
        embedded = rms_norm(functional.embedding(part[:, 1:], model[EMBED]), head[OF_EMBEDDING])
        states = rms_norm(rms_norm(stream[-1], model[NORM])[:, :-1], undone)
        x = torch.cat([embedded, states], -1).flatten(0, 1)
        square += x.T @ x
        product += x.T @ stream[layers[0]][:, 1:].flatten(0, 1)
    ridge = 0.01 * square.diagonal().mean() * torch.eye(2 * size)
    head[FC] = torch.linalg.solve(square + ridge, product).T
    return {name: weight.float().contiguous() for name, weight in head.items()}


class HeadTrainer(Trainer):
    """Training of the head's weights; the model's are constant.

    Args:
        model: the model's weights.
        args: the command line.
    """

    def __init__(self, model: Weights, tokens: Tensor, args: argparse.Namespace) -> None:
        self.model = {name: weight.float() for name, weight in model.items()}
        super().__init__(new_head(self.model, args.layers, tokens), None, args)

    def logits(self, states: Tensor) -> Tensor:
        """Return the output head's logits, fp32 [positions, vocab]."""
        return functional.linear(states, self.model[EMBED]).flatten(0, 1)

    def head_step(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the head's normed states, given those before each of the tokens."""
        weights = self.weights
        embedded = functional.embedding(tokens, self.model[EMBED])
        both = torch.cat(
            [rms_norm(embedded, weights[OF_EMBEDDING]), rms_norm(states, weights[OF_HIDDEN])], -1
        )
        x = functional.linear(both, weights[FC])
        for i in range(len(self.args.layers)):
            x = decoder_layer(x, tuple(weights[f"mtp.layers.{i}.{name}.weight"] for name in LAYER))
        return rms_norm(x, weights[OUT])

    def losses(self, tokens: Tensor) -> tuple[Tensor, list[float]]:
        """Return the loss over all steps, and how often each step's likeliest token is the model's."""
        with torch.no_grad():
            states = rms_norm(streams(self.model, tokens)[-1], self.model[NORM])
            wanted = self.logits(states).view(*tokens.shape, -1)
        loss, right = torch.zeros(()), []
        for step in range(1, self.args.steps + 1):
            states = self.head_step(states[:, :-1], tokens[:, step:])
            targets, guesses = wanted[:, step:].flatten(0, 1), self.logits(states)
            loss = loss + functional.cross_entropy(guesses, targets.softmax(-1)) * self.args.fade ** (
                step - 1
            )
            right.append((guesses.argmax(-1) == targets.argmax(-1)).float().mean().item())
        return loss, right

    def gradients(self, tokens: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        """Return the loss on some windows and its gradients."""
        loss, self.right = self.losses(tokens[:, :-1].contiguous())
        return loss.item(), torch.autograd.grad(loss, list(self.weights.values()))


def main() -> None:
    """Train a head and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model, of train_demo_model.py")
    add("--out", type=Path, required=True, help="folder to write")
    add("--minutes", type=float, default=60, help="time to train for (default %(default)s)")
    add("--layers", type=int, nargs="+", default=[5, 7], help="layers to copy (default %(default)s)")
    add("--steps", type=int, default=2, help="steps of the head that are trained (default %(default)s)")
    add(
        "--fade", type=float, default=0.7, help="weight of a step's loss by that before (default %(default)s)"
    )
    add("--window", type=int, default=256, help="tokens per training window (default %(default)s)")
    add("--batch", type=int, default=8, help="windows per update (default %(default)s)")
    add("--micro", type=int, default=4, help="windows per thread at a time (default %(default)s)")
    add("--lr", type=float, default=2e-3, help="full learning rate (default %(default)s)")
    add("--warmup", type=int, default=30, help="updates of the rising learning rate (default %(default)s)")
    add(
        "--decay",
        type=float,
        default=0.6,
        help="fraction of the time with a falling rate (default %(default)s)",
    )
    add("--max-steps", type=int, default=-1, help="maximum number of updates (default: no limit)")
    add("--save-every", type=float, default=5, help="minutes between checkpoints (default %(default)s)")
    add("--threads", type=int, default=2, help="cores to train on (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the order (default %(default)s)")
    args = parser.parse_args()
    args.no_compile = True
    held, library, others = read_sources()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    rng = random.Random(args.seed)
    files = [*encode_cut(tokenizer, library, 0.04, rng), *encode_cut(tokenizer, others, 0.04, rng)]
    text = next(batches(files, args.window, 48, random.Random(args.seed)))
    trainer = HeadTrainer(load_file(args.model / "model.safetensors"), text[:, :-1], args)

    def save() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in trainer.weights.items()}
        save_file(tensors, args.out / "model.part", metadata={"format": "pt"})
        (args.out / "model.part").replace(args.out / "model.safetensors")
        (args.out / "config.json").write_text(CONFIG)
        print("right in the last windows:", *(f"{share:.3f}" for share in trainer.right), flush=True)

    began = time.monotonic()
    steps = trainer.run(files, save)
    save()
    seen, minutes = steps * args.batch * args.window / 1e6, (time.monotonic() - began) / 60
    print(f"{minutes:.0f} minutes, {steps} updates, {seen:.1f} M tokens")
    stream = torch.cat(encode_cut(tokenizer, held, 0.0, rng))
    rows = stream[: len(stream) // args.window // 3 * args.window].view(-1, args.window)
    with torch.no_grad():
        right = torch.tensor([trainer.losses(part)[1] for part in rows.split(8)]).mean(0)
    print(
        "held-out, same likeliest token as the model, by step:", *(f"{share:.3f}" for share in right.tolist())
    )


if __name__ == "__main__":
    main()
