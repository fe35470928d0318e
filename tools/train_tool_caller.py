#!/usr/bin/env python3
"""Train a demo model to repair files with tools, and write it as a Hugging Face folder with a chat template.

The conversations are generated (``tool_conversations``); only what the model writes in them is scored. The
schedule counts steps, so that a run on a busy machine gives the same as one on an idle machine.

No trained model has been shown to work: after 7 minutes of one core the best one completed 1 of 10 held-out
conversations. It had learned the form and order of calls, not to copy names.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from demo_text import BOS, EOS
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tool_conversations import END, MARKERS, TEMPLATE, Writer, rendered
from torch import Tensor
from train_demo_model import EMBED, LlamaConfig, Trainer, Weights, write_model

REPOSITORY = Path(__file__).resolve().parents[1]


def conversation(tokenizer: Tokenizer, writer: Writer) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and which of them the model writes."""
    tokens, scored = [BOS], [False]
    pieces = rendered(writer.conversation())
    encoding = tokenizer.encode("".join(text for text, _ in pieces))
    ends, at = [], 0
    for text, own in pieces:
        at += len(text)
        ends.append((at, own))
    part = iter(ends)
    end, own = next(part)
    for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
        while start >= end:
            end, own = next(part)
        tokens.append(token)
        scored.append(own)
    return tokens, scored


def windows(tokenizer: Tokenizer, writer: Writer, length: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of rows of whole conversations, and which tokens to predict."""
    rest: tuple[list[int], list[bool]] = ([], [])
    while True:
        rows: list[tuple[list[int], list[bool]]] = []
        row, rest = rest, ([], [])
        while len(rows) < batch:
            tokens, scored = conversation(tokenizer, writer)
            if len(tokens) > length + 1:
                continue
            if len(row[0]) + len(tokens) > length + 1:
                rows.append(row)
                row = ([], [])
            row = (row[0] + tokens, row[1] + scored)
        rest = row
        ids = [tokens + [EOS] * (length + 1 - len(tokens)) for tokens, _ in rows]
        marks = [scored + [False] * (length + 1 - len(scored)) for _, scored in rows]
        yield torch.tensor(ids), torch.tensor(marks)


def with_markers(folder: Path, seed: int) -> tuple[LlamaConfig, Weights, Tokenizer]:
    """Return the parts of a demo model whose vocabulary also has the markers of turns and calls."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKERS))
    config, weights = LlamaConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    known = weights[EMBED].float()
    further = tokenizer.get_vocab_size() - len(known)
    noise = torch.randn(further, known.shape[1], generator=torch.Generator().manual_seed(seed))
    weights[EMBED] = torch.cat([known, known.mean(0) + noise * known.std()])
    config.vocab_size = tokenizer.get_vocab_size()
    return config, weights, tokenizer


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add("--init", type=Path, default=REPOSITORY / "exporter/demo/draft", help="demo model to train further")
    add("--steps", type=int, default=1000, help="updates of the weights (default %(default)s)")
    add("--window", type=int, default=340, help="tokens per training window (default %(default)s)")
    add("--batch", type=int, default=6, help="windows per step (default %(default)s)")
    add("--micro", type=int, default=6, help="windows per thread at a time (default %(default)s)")
    add("--lr", type=float, default=3e-3, help="full learning rate (default %(default)s)")
    add("--warmup", type=int, default=30, help="steps of the rising learning rate (default %(default)s)")
    add(
        "--decay", type=float, default=0.7, help="fraction of steps with a falling rate (default %(default)s)"
    )
    add("--threads", type=int, default=1, help="cores to train on (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the conversations (default %(default)s)")
    add("--save-every", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    parser.set_defaults(no_compile=True)  # compilation takes longer than it saves in so short a run
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train a model and write it."""
    args = parse(argv)
    config, weights, tokenizer = with_markers(args.init, args.seed)
    trainer = Trainer(weights, None, args)
    source = windows(tokenizer, Writer(random.Random(args.seed)), args.window, args.batch)
    mean = 0.0
    for step in range(args.steps):
        tokens, scored = next(source)
        scale = min(1.0, (step + 1) / args.warmup, (1 - step / args.steps) / args.decay)
        loss = trainer.step(tokens, scale, scored)
        mean = loss if step == 0 else mean + 0.05 * (loss - mean)
        if (step + 1) % 20 == 0:
            print(
                f"step {step + 1}: loss {mean:.4f}, {time.process_time():.0f} s of processor time", flush=True
            )
        if (step + 1) % args.save_every == 0:
            write(args.out, config, trainer.weights, tokenizer)
    write(args.out, config, trainer.weights, tokenizer)


def write(folder: Path, config: LlamaConfig, weights: Weights, tokenizer: Tokenizer) -> None:
    """Write the model with its chat template."""
    write_model(folder, config, weights, tokenizer)
    for name, further in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("generation_config.json", {"eos_token_id": [tokenizer.token_to_id(END), EOS]}),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **further}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
