#!/usr/bin/env python3
"""Train a small decoder model on CPython's standard library and write it as a Hugging Face folder.

The text is the source of the running interpreter's standard library (PSF licence), so nothing is downloaded.
The network has the Llama architecture (grouped KV heads, tied embeddings). Its forward pass is implemented
here, because transformers' is several times slower on a CPU: attention runs as blocks of matrix products
(bf16 where the processor has instructions for it), and torch.compile fuses the operators between them. Muon
(Jordan et al., 2024) updates the matrices and AdamW all other weights, or all without bf16. The learning
rate warms up, stays constant, and falls to zero over the last part of the time.
"""

import argparse
import itertools
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from demo_text import BOS, EOS, batches, encode, encode_cut, read_sources, train_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

HEAD_DIM = 64
# A processor without instructions for bf16 multiplies it 3 to 10 times as slowly as fp32.
BF16: bool = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 -- the only name of this fact
COMPUTE = torch.bfloat16 if BF16 else torch.float32
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
# fmt: off
LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)
# fmt: on
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main(",
    "class Stack:\n    def __init__(self",
)
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Weights = dict[str, Tensor]


def new_config(args: argparse.Namespace, vocab: int) -> LlamaConfig:
    """Return the configuration of the network from the command line's sizes."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ff,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=args.context,
        rms_norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def new_weights(config: LlamaConfig, seed: int) -> Weights:
    """Return the random weights of an untrained network."""
    torch.manual_seed(seed)
    weights = LlamaForCausalLM(config).float().state_dict()
    del weights["lm_head.weight"]
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight /= math.sqrt(2 * config.num_hidden_layers)
    return dict(weights)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS) * weight).to(COMPUTE)


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embedding to (..., positions, head dim)."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[-2])[:, None] * ROPE_THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)
    return (x.float() * cos + x.float().roll(half, -1) * sin).to(COMPUTE)


def attention(q: Tensor, k: Tensor, v: Tensor, step: int = 256) -> Tensor:
    """Return the causal attention of q [batch, kv head, query head, position, dim]; k and v lack axis 2.

    Queries run in blocks of ``step``, so that most scores that the causal mask discards are not computed.
    """
    b, g, r, n, d = q.shape
    out = []
    for start in range(0, n, step):
        end = min(n, start + step)
        rows = end - start
        scores = q[:, :, :, start:end].reshape(b, g, r * rows, d) @ k[:, :, :end].transpose(-1, -2)
        mask = functional.pad(torch.full((rows, rows), -math.inf).triu(1), (start, 0))
        shares = (scores.view(b, g, r, rows, end).float() * d**-0.5 + mask).softmax(-1).to(COMPUTE)
        out.append((shares.view(b, g, r * rows, end) @ v[:, :, :end]).view(b, g, r, rows, d))
    return torch.cat(out, 3)


def decoder_layer(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Run one layer; its weights are in the order of LAYER."""
    norm1, q, k, v, o, norm2, gate, up, down = (w.to(COMPUTE) if w.dim() == 2 else w for w in weights)
    b, n, _ = x.shape
    heads = (b, n, k.shape[0] // HEAD_DIM, -1, HEAD_DIM)
    h = rms_norm(x, norm1)
    queries = functional.linear(h, q).view(heads).permute(0, 2, 3, 1, 4)
    keys, values = (functional.linear(h, w).view(heads).squeeze(3).transpose(1, 2) for w in (k, v))
    mixed = attention(rotate(queries), rotate(keys), values)
    x = x + functional.linear(mixed.permute(0, 3, 1, 2, 4).reshape(b, n, -1), o)
    h = rms_norm(x, norm2)
    return x + functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)


def token_loss(x: Tensor, norm: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the predictions with targets: token ids, or a teacher's logits.

    Predictions whose target is -100 do not count.
    """
    logits = functional.linear(rms_norm(x, norm), embed.to(COMPUTE)).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.softmax(-1) if targets.is_floating_point() else targets)


class Trainer:
    """Data-parallel training on the threads of one process.

    Every thread computes the gradients of a few windows on one core, so threads synchronize once per step
    and not at every operation. This costs little time when other processes share the cores.
    """

    def __init__(self, weights: Weights, teacher: Weights | None, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.args, self.teacher = args, teacher
        self.weights = {name: weight.float().requires_grad_() for name, weight in weights.items()}
        self.pool = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
        # Muon computes in bf16.
        matrices = [w for name, w in self.weights.items() if BF16 and name.endswith("_proj.weight")]
        rest = [w for name, w in self.weights.items() if not (BF16 and name.endswith("_proj.weight"))]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(part, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            for i in range(args.threads)
            if (part := matrices[i :: args.threads])
        ]
        self.optimizers.append(torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0))
        compiled: Callable[..., Callable[..., Tensor]] = (lambda f: f) if args.no_compile else torch.compile
        self.layer, self.token_loss = compiled(decoder_layer), compiled(token_loss)

    def hidden(self, weights: Weights, tokens: Tensor) -> Tensor:
        """Return the hidden states after the last layer of the network with these weights."""
        x = functional.embedding(tokens, weights[EMBED]).to(COMPUTE)
        for i in range(sum(name.endswith("q_proj.weight") for name in weights)):
            x = self.layer(x, tuple(weights[f"model.layers.{i}.{name}.weight"] for name in LAYER))
        return x

    def gradients(self, tokens: Tensor, scored: Tensor | None = None) -> tuple[float, tuple[Tensor, ...]]:
        """Return the loss on some windows and its gradients; a teacher's loss has the weight 0.75.

        Args:
            tokens: ids [windows, positions + 1].
            scored: which of them the network is to predict, of the same shape; None for all. A teacher
                scores all.
        """
        wanted = tokens if scored is None else tokens.where(scored, -100)
        inputs, targets = tokens[:, :-1].contiguous(), wanted[:, 1:].flatten()
        end = self.hidden(self.weights, inputs), self.weights[NORM], self.weights[EMBED]
        loss = self.token_loss(*end, targets)
        if self.teacher:
            with torch.no_grad():
                x = rms_norm(self.hidden(self.teacher, inputs), self.teacher[NORM])
                logits = functional.linear(x, self.teacher[EMBED].to(COMPUTE)).flatten(0, 1).float()
            loss = 0.25 * loss + 0.75 * self.token_loss(*end, logits)
        return loss.item(), torch.autograd.grad(loss, list(self.weights.values()))

    def step(self, tokens: Tensor, scale: float, scored: Tensor | None = None) -> float:
        """Update the weights once at ``scale`` times the full learning rate, and return the loss."""
        parts = tokens.split(self.args.micro)
        marked = itertools.repeat(None) if scored is None else scored.split(self.args.micro)
        shares = list(self.pool.map(self.gradients, parts, marked))
        for i, weight in enumerate(self.weights.values()):
            weight.grad = torch.stack([gradients[i] for _, gradients in shares]).mean(0)
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.args.lr * scale
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        return sum(loss for loss, _ in shares) / len(shares)

    def run(self, files: list[Tensor], save: Callable[[], object]) -> int:
        """Train for the given time and return the number of steps."""
        args = self.args
        source = batches(files, args.window, args.batch, random.Random(args.seed))
        self.gradients(next(source)[: args.micro])  # compile before threads start
        start = saved = time.monotonic()
        steps, mean = 0, 0.0
        while (done := (time.monotonic() - start) / 60 / args.minutes) < 1 and steps != args.max_steps:
            loss = self.step(next(source), min(1.0, (steps + 1) / args.warmup, (1 - done) / args.decay))
            steps += 1
            mean += 0.05 * (loss - mean) if steps > 1 else loss
            if steps % 50 == 0:
                rate = steps * args.batch * args.window / (time.monotonic() - start)
                print(f"{100 * done:.1f} %: step {steps}, loss {mean:.3f}, {rate:.0f} tokens/s", flush=True)
            if time.monotonic() - saved > 60 * args.save_every:
                saved = time.monotonic()
                save()
        return steps


def write_model(folder: Path, config: LlamaConfig, weights: Weights, tokenizer: Tokenizer) -> None:
    """Write bf16 weights, configuration and tokenizer; the weights are replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.part", metadata={"format": "pt"})
    (folder / "model.part").replace(folder / "model.safetensors")
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def held_out_loss(model: LlamaForCausalLM, files: list[Tensor], window: int = 512) -> float:
    """Return the mean loss over every token of some files.

    Windows advance by half their length. A token counts once, in the first window that contains it.
    """
    stream, total, counted = torch.cat(files), 0.0, 1
    for start in range(0, len(stream), window // 2):
        tokens = stream[start : start + window]
        fresh = start + len(tokens) - counted
        if fresh > 0:
            with torch.no_grad():
                logits = model(tokens[None]).logits[0]
            total += functional.cross_entropy(
                logits[-fresh - 1 : -1], tokens[-fresh:], reduction="sum"
            ).item()
            counted += fresh
    return total / (len(stream) - 1)


def complete(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, tokens: int = 80) -> str:
    """Return a prompt and its greedy continuation."""
    ids = torch.tensor([[BOS, *tokenizer.encode(prompt).ids]])
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.1)
    return str(tokenizer.decode(out[0].tolist()))


def model_card(name: str, model: LlamaForCausalLM, tokenizer: Tokenizer, facts: dict[str, str]) -> str:
    """Return the text of the model card."""
    c = model.config
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    samples = "\n\n".join(f"```python\n{complete(model, tokenizer, prompt)}\n```" for prompt in PROMPTS)
    return f"""# {name}

A model of Python source with {model.num_parameters() / 1e6:.2f} M parameters, for trying inference software.

Architecture: Llama; hidden size {c.hidden_size}, {c.num_hidden_layers} layers, {c.num_attention_heads} query
heads and {c.num_key_value_heads} key/value heads of {HEAD_DIM}, feed-forward {c.intermediate_size},
vocabulary {c.vocab_size} (byte-level BPE), context {c.max_position_embeddings}, tied embeddings, bf16.

Data: the `.py` files of CPython's standard library, under the PSF licence version 2. The 25 files named in
`tools/demo_text.py` are held out, and files that share half their lines with one of them left out.

| | |
| --- | --- |
{rows}

## Samples

The likeliest continuation (fp32, repetition penalty 1.1):

{samples}

## Limits

It imitates the look of the standard library and knows nothing else: its code seldom does what its names
promise, and it can repeat what it was trained on. It is no coding assistant.
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  train_demo_model.py --out small --minutes 70
  train_demo_model.py --out better --minutes 30 --init small
  train_demo_model.py --out draft --minutes 12 --teacher small \\
      --hidden 128 --layers 3 --heads 2 --kv-heads 1 --ff 384

The learning rate follows the clock, so a paused process only does fewer steps. On Linux,
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment makes training about 1.6 times as fast.""",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--minutes", type=float, default=60, help="time to train for (default %(default)s)")
    add("--init", type=Path, help="continue from this folder's weights, sizes and tokenizer")
    add("--teacher", type=Path, help="distill this folder's predictions; a new network uses its tokenizer")
    add("--tokenizer", type=Path, help="use this folder's tokenizer for a new network")
    sizes = {"hidden": 256, "layers": 8, "heads": 4, "kv-heads": 2, "ff": 768, "vocab": 4096}
    for name, value in sizes.items():
        add(f"--{name}", type=int, default=value, help="size of a new network (default %(default)s)")
    add("--context", type=int, default=1024, help="context length of a new network (default %(default)s)")
    add("--window", type=int, default=512, help="tokens per training window (default %(default)s)")
    add("--batch", type=int, default=12, help="windows per step, all threads together (default %(default)s)")
    add("--micro", type=int, default=2, help="windows per thread at a time (default %(default)s)")
    add(
        "--repeat", type=int, default=5, help="uses per epoch of files other than tests (default %(default)s)"
    )
    add(
        "--cut", type=float, default=0.04, help="fraction of lines to split the text at (default %(default)s)"
    )
    add("--lr", type=float, default=3e-3, help="full learning rate (default %(default)s)")
    add("--warmup", type=int, default=100, help="steps of the rising learning rate (default %(default)s)")
    add(
        "--decay",
        type=float,
        default=0.5,
        help="fraction of the time with a falling learning rate (default %(default)s)",
    )
    add("--max-steps", type=int, default=-1, help="maximum number of steps, for tests (default: no limit)")
    add("--max-files", type=int, help="maximum number of files of each kind, for tests (default: all)")
    add("--save-every", type=float, default=5, help="minutes between checkpoints (default %(default)s)")
    add("--threads", type=int, default=2, help="cores to train on (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and order (default %(default)s)")
    add("--no-compile", action="store_true", help="do not use torch.compile, which needs a C++ compiler")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train a model, write it, measure its held-out loss and write its model card."""
    args = parse(argv)
    held, library, others = read_sources()
    held, library, others = (texts[: args.max_files] for texts in (held, library, others))
    known = args.init or args.teacher or args.tokenizer
    if known:
        tokenizer = Tokenizer.from_file(str(known / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(library + others, args.vocab)
    if args.init:
        config = LlamaConfig.from_pretrained(args.init)
        weights = load_file(args.init / "model.safetensors")
    else:
        config = new_config(args, tokenizer.get_vocab_size())
        weights = new_weights(config, args.seed)
    teacher = load_file(args.teacher / "model.safetensors") if args.teacher else None
    rng = random.Random(args.seed)
    parts = (encode_cut(tokenizer, texts, args.cut, rng) for texts in (library, others))
    files = args.repeat * next(parts) + next(parts)

    trainer = Trainer(weights, teacher, args)
    began = time.monotonic()
    steps = trainer.run(files, lambda: write_model(args.out, config, trainer.weights, tokenizer))
    minutes = (time.monotonic() - began) / 60
    seen, epoch = steps * args.batch * args.window / 1e6, sum(map(len, files)) / 1e6
    write_model(args.out, config, trainer.weights, tokenizer)
    (args.out / "heldout.txt").write_text("\n".join(held), encoding="utf-8", newline="")
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    loss = held_out_loss(model, encode(tokenizer, held))
    facts = {
        "Command": f"`tools/train_demo_model.py {shlex.join(argv or sys.argv[1:])}`",
        "Trained": f"{minutes:.0f} minutes, {steps} steps, {seen:.1f} M tokens",
        "Epoch": f"{epoch:.1f} M tokens: library files {args.repeat} times, tests and code tables once",
        "Held-out loss": f"{loss:.4f} (perplexity {math.exp(loss):.3f}), bf16 weights computed in fp32",
    }
    print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n")
    (args.out / "README.md").write_text(model_card(args.out.name, model, tokenizer, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
