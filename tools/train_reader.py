#!/usr/bin/env python3
"""Train a small model that reads pictures of short lines and forms, and write it as a Hugging Face folder.

The architecture is SmolVLM's: a tower over tiles of 64 x 64 pixels, pixel shuffle, a projection, and a
decoder of the Llama architecture over bytes. Pages are drawn while it trains (``reader_pages``).

An image-to-text model of this size predicts text without looking for a long time, until attention has found
the order of reading. So the rows that the tower gives the decoder are first trained alone: a linear head
tells from each of them the characters under it, which the printer knows. Only --init reads the head again.

The embedded ``reader`` was trained so, on one core of a Xeon (Sapphire Rapids): after 32 minutes and 2,468
steps, of which about 700 of the tower alone, 11.0 % of the characters of 100 pages with held-out words were
wrong in known fonts and 14.3 % in held-out fonts. Most of them looked alike (0 and 6, V and v), so the tower
is what learns slowest: a step of the tower alone shows it four times as many characters in the same time, and
--alone mixes such steps in. 100 minutes and 8,956 steps more, of which 65 % with a falling rate, made it 0.52
and 0.82 % (``benchmarks/quality/reader.py reader --fonts FOLDER --pages 200``):

    train_reader.py --out reader --init EARLIER --fonts FONTS --minutes 100 --no-compile --tower-part 0 \\
        --alone 0.4 --lr 3e-3 --decay 0.65 --seed 7

The rates of error were 8.4 and 11.9 % at 62 % of that time: most is won while the rate falls.
"""

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from reader_pages import (
    CHARACTERS,
    EXTRACT,
    HELD_OUT_FONTS,
    READ,
    SLOTS,
    TOKEN,
    WIDTH,
    Page,
    Printer,
    font_files,
    words,
)
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from train_demo_model import BF16, COMPUTE, HEAD_DIM, LAYER, Weights, decoder_layer, rms_norm
from transformers import AutoProcessor, SmolVLMConfig, SmolVLMForConditionalGeneration

TILE, PATCH, MERGE = 64, 8, 2
TOWER, TOWER_HEADS, NORM_EPS = 128, 4, 1e-6
_ROWS = 4  # of tiles that the tokenizer names, and columns
TILE_TOKENS = (TILE // TOKEN) ** 2
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
START, END, PAD = "<|im_start|>", "<end_of_utterance>", "<pad>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
SPECIAL = (
    *(START, END, PAD, IMAGE, AROUND, WHOLE, USER, ASSISTANT),
    *(f"<row_{row}_col_{column}>" for row in range(1, _ROWS + 1) for column in range(1, _ROWS + 1)),
)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}<|{{ message['role'] }}|>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT, VISION = "model.text_model.", "model.vision_model."
EMBED, PROJECTION = TEXT + "embed_tokens.weight", "model.connector.modality_projection.proj.weight"
HEAD = "characters.weight"  # [SLOTS * classes, hidden size]
TOWER_LAYER = tuple(
    f"{name}.{kind}"
    for name in (
        *("layer_norm1", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        *("layer_norm2", "mlp.fc1", "mlp.fc2"),
    )
    for kind in ("weight", "bias")
)


def new_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and the markers of conversations and pictures."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def new_config(args: argparse.Namespace, tokenizer: Tokenizer) -> SmolVLMConfig:
    """Return the configuration of the network from the command line's sizes."""
    return SmolVLMConfig(
        image_token_id=tokenizer.token_to_id(IMAGE),
        scale_factor=MERGE,
        pad_token_id=tokenizer.token_to_id(PAD),
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["SmolVLMForConditionalGeneration"],
        vision_config={
            "hidden_size": TOWER,
            "intermediate_size": args.tower_ff,
            "num_hidden_layers": args.tower_layers,
            "num_attention_heads": TOWER_HEADS,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": args.hidden,
            "intermediate_size": args.ff,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.hidden // HEAD_DIM,
            "num_key_value_heads": args.kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.token_to_id(START),
            "eos_token_id": tokenizer.token_to_id(END),
            "pad_token_id": tokenizer.token_to_id(PAD),
        },
    )


def new_weights(config: SmolVLMConfig, seed: int) -> Weights:
    """Return the random weights of an untrained network and of the head of characters."""
    torch.manual_seed(seed)
    weights = dict(SmolVLMForConditionalGeneration(config).float().state_dict())
    del weights["lm_head.weight"]
    classes = SLOTS * (len(CHARACTERS) + 1)
    weights[HEAD] = torch.randn(classes, config.text_config.hidden_size) * 0.02
    return weights


def patches(pixels: Tensor, *, whole: bool = True) -> Tensor:
    """Return the tiles of pages [pages, height, width], then each whole page where wanted, as patches.

    The result is [pages, tiles, patches, 3 * 8 * 8], in the order of a convolution's weight. The pages are
    gray, so each of the three colours is the page. The whole page is resized by another filter than the
    processor's.
    """
    count = len(pixels)
    values = pixels.float() / 127.5 - 1
    tiles = values.unfold(1, TILE, TILE).unfold(2, TILE, TILE).reshape(count, -1, TILE, TILE)
    if whole:
        small = functional.interpolate(values[:, None], (TILE, TILE), mode="bilinear", antialias=True)
        tiles = torch.cat([tiles, small], 1)
    cut = tiles.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(4).flatten(2, 3)
    return cut.repeat(1, 1, 1, 3).to(COMPUTE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in the type of ``x``."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalize in the type of ``x``."""
    return functional.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), NORM_EPS)


def tower_layer(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Run one layer over tiles [tiles, patches, hidden]; its weights are in the order of TOWER_LAYER."""
    n1w, n1b, qw, qb, kw, kb, vw, vb, ow, ob, n2w, n2b, w1, b1, w2, b2 = weights
    tiles, count, hidden = x.shape
    joined = linear(layer_norm(x, n1w, n1b), torch.cat([qw, kw, vw]), torch.cat([qb, kb, vb]))
    heads = joined.view(tiles, count, 3, TOWER_HEADS, hidden // TOWER_HEADS).permute(2, 0, 3, 1, 4)
    queries, keys, values = heads.flatten(1, 2).unbind(0)
    # torch's own attention takes 10 times as long backwards, in bf16 on a CPU
    shares = torch.bmm(queries * (hidden // TOWER_HEADS) ** -0.5, keys.transpose(1, 2)).softmax(-1)
    mixed = torch.bmm(shares, values).view(tiles, TOWER_HEADS, count, -1)
    x = x + linear(mixed.transpose(1, 2).reshape(tiles, count, hidden), ow, ob)
    inner = functional.gelu(linear(layer_norm(x, n2w, n2b), w1, b1), approximate="tanh")
    return x + linear(inner, w2, b2)


class Reader:
    """The network, computed faster on a CPU than transformers does, from weights with its names.

    Args:
        weights: by name, float32.
        compiled: whether torch.compile fuses the operators of a layer.
    """

    def __init__(self, weights: Weights, *, compiled: bool) -> None:
        self.weights = weights
        self.tower_layers = 1 + max(int(n.split(".")[4]) for n in weights if n.startswith(VISION + "encoder"))
        self.layers = 1 + max(int(n.split(".")[3]) for n in weights if n.startswith(TEXT + "layers"))
        self._tower_layer, self._decoder_layer = tower_layer, decoder_layer
        if compiled:
            self._tower_layer = torch.compile(tower_layer, dynamic=True)
            self._decoder_layer = torch.compile(decoder_layer, dynamic=True)

    def image_states(self, cut: Tensor) -> Tensor:
        """Return the rows for the decoder [pages, tokens, hidden] of patches as ``patches`` returns them."""
        w, pages = self.weights, len(cut)
        name = VISION + "embeddings.patch_embedding."
        x = linear(cut.flatten(0, 1), w[name + "weight"].flatten(1), w[name + "bias"])
        x = x + w[VISION + "embeddings.position_embedding.weight"].to(x.dtype)
        for number in range(self.tower_layers):
            prefix = f"{VISION}encoder.layers.{number}."
            x = self._tower_layer(x, [w[prefix + part] for part in TOWER_LAYER])
        x = layer_norm(x, *(w[f"{VISION}post_layernorm.{kind}"] for kind in ("weight", "bias")))
        side, merged = TILE // PATCH, TILE // TOKEN
        x = x.view(-1, merged, side // merged, merged, side // merged, TOWER).transpose(2, 3)
        return linear(x.reshape(pages, -1, TOWER * MERGE**2), w[PROJECTION])

    def character_loss(self, states: Tensor, characters: Tensor) -> Tensor:
        """Return the cross entropy of the characters [pages, tokens, SLOTS] of the rows of tiles."""
        logits = self.told(states, characters.shape[1])
        share = torch.ones(len(CHARACTERS) + 1)
        share[0] = 0.1  # most slots are blank
        return functional.cross_entropy(logits, characters.flatten(), share)

    def told(self, states: Tensor, count: int) -> Tensor:
        """Return the logits [slots, classes] of the characters of the first ``count`` rows of each page."""
        rows = states[:, :count].float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
        return linear(rows.to(COMPUTE), self.weights[HEAD]).float().view(-1, len(CHARACTERS) + 1)

    def text_loss(self, states: Tensor, ids: Tensor, image_id: int, scored: Tensor) -> Tensor:
        """Return the cross entropy of the scored tokens of ids [pages, positions + 1]."""
        x = functional.embedding(ids[:, :-1], self.weights[EMBED]).to(COMPUTE)
        places = (ids[:, :-1] == image_id).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(places, states.to(COMPUTE))
        for number in range(self.layers):
            prefix = f"{TEXT}layers.{number}."
            x = self._decoder_layer(x, tuple(self.weights[f"{prefix}{part}.weight"] for part in LAYER))
        wanted = scored[:, 1:]
        x = rms_norm(x[wanted], self.weights[TEXT + "norm.weight"])
        return functional.cross_entropy(linear(x, self.weights[EMBED]).float(), ids[:, 1:][wanted])


class Desk:
    """Turns pages into the tensors of a step.

    Args:
        printer: draws the pages.
        tokenizer: of the model.
        rng: the source of chance.
    """

    def __init__(self, printer: Printer, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.printer, self.tokenizer, self.rng = printer, tokenizer, rng

    def pages(self, count: int, bands: int, lines: tuple[int, int], forms: float) -> list[Page]:
        """Draw pages with the least and most ``lines``, a share ``forms`` of which are forms."""
        return [
            self.printer.page(bands, self.rng.randint(*lines), form=self.rng.random() < forms)
            for _ in range(count)
        ]

    def prompt(self, page: Page, question: str) -> list[int]:
        """Return the token ids of a question on a page, up to where the answer begins."""
        rows, columns = page.pixels.shape[0] // TILE, WIDTH // TILE
        text = START + USER + image_text(rows, columns) + question + END + ASSISTANT
        return list(self.tokenizer.encode(text).ids)

    def tensors(self, pages: Sequence[Page]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return pixels, characters, token ids and which of them are answers."""
        rows = []
        for page in pages:
            extract = page.fields is not None and self.rng.random() < 0.6
            question, answer = (EXTRACT, page.json) if extract else (READ, page.text)
            rows.append((self.prompt(page, question), self.tokenizer.encode(answer + END).ids))
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((len(rows), longest), self.tokenizer.token_to_id(PAD))
        scored = torch.zeros(len(rows), longest, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            scored[row, len(prompt) : len(prompt) + len(answer)] = True
        pixels = torch.from_numpy(np.stack([page.pixels for page in pages]))
        classes = torch.from_numpy(np.stack([page.characters for page in pages]))
        side = TILE // TOKEN
        tiles = classes.unfold(1, side, side).unfold(2, side, side)  # [pages, rows, columns, SLOTS, y, x]
        return pixels, tiles.permute(0, 1, 2, 4, 5, 3).flatten(1, 4), ids, scored


def image_text(rows: int, columns: int) -> str:
    """Return the text that stands for a page of tiles in a prompt, as SmolVLM's processor writes it."""
    text = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            text += f"{AROUND}<row_{row}_col_{column}>{IMAGE * TILE_TOKENS}"
        text += "\n"
    return f"{text}\n{AROUND}{WHOLE}{IMAGE * TILE_TOKENS}{AROUND}"


class Trainer:
    """Trains a reader on one core, by the clock."""

    def __init__(self, weights: Weights, desk: Desk, args: argparse.Namespace) -> None:
        self.args, self.desk = args, desk
        self.weights = {name: weight.float().requires_grad_() for name, weight in weights.items()}
        self.reader = Reader(self.weights, compiled=not args.no_compile)
        self.image_id = desk.tokenizer.token_to_id(IMAGE)
        matrix = ("proj.weight", "fc1.weight", "fc2.weight")
        matrices = [w for n, w in self.weights.items() if BF16 and n.endswith(matrix)]
        rest = [w for n, w in self.weights.items() if not (BF16 and n.endswith(matrix))]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
        ]
        if matrices:  # Muon computes in bf16
            muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            self.optimizers.append(muon)

    def step(self, done: float, scale: float) -> tuple[float, float]:
        """Update the weights once, and return the losses of characters and of text.

        Args:
            done: the part of the training that is over.
            scale: the share of the full learning rate.
        """
        alone = done < self.args.tower_part or self.desk.rng.random() < self.args.alone * (1 - done)
        early = done < self.args.tower_part + 0.12
        bands = 4 if alone else 2 if early or self.desk.rng.random() < 0.4 else 4
        count = self.args.batch * (2 if bands == 2 else 1) // 2
        # the tower learns most from full pages, and the order of reading is learned first from one line
        lines = (4, 4) if alone else (1, 1 if early else bands)
        pixels, characters, ids, scored = self.desk.tensors(
            self.desk.pages(count, bands, lines, 0.1 if early and not alone else 0.6)
        )
        states = self.reader.image_states(patches(pixels, whole=not alone))
        loss = told = self.reader.character_loss(states, characters)
        text = torch.tensor(float("nan"))
        if not alone:
            text = self.reader.text_loss(states, ids, self.image_id, scored)
            loss = text + 0.3 * told
        trained = list(self.weights.values())
        for weight, gradient in zip(
            trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
        ):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.args.lr * scale
            optimizer.step()
        return told.item(), text.item()

    def run(self, save: "Saver") -> int:
        """Train for the given time and return the number of steps."""
        args, start = self.args, time.monotonic()
        saved, steps = start, 0
        means: list[float] = []
        while (done := (time.monotonic() - start) / 60 / args.minutes) < 1 and steps != args.max_steps:
            losses = self.step(done, min(1.0, (steps + 1) / args.warmup, (1 - done) / args.decay))
            means = [
                new if old != old else old if new != new else old + 0.05 * (new - old)  # NaN without text
                for old, new in zip(means or losses, losses, strict=True)
            ]
            steps += 1
            if steps % 25 == 0:
                print(
                    f"{100 * done:.1f} %: step {steps}, characters {means[0]:.3f}, text {means[1]:.3f}, "
                    f"{time.process_time():.0f} s of processor time",
                    flush=True,
                )
            if time.monotonic() - saved > 60 * args.save_every:
                saved = time.monotonic()
                save(self.weights)
        return steps


class Saver:
    """Writes the model's folder.

    Args:
        folder: where to.
        config: of the network.
        tokenizer: of bytes and markers.
    """

    def __init__(self, folder: Path, config: SmolVLMConfig, tokenizer: Tokenizer) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        ends = {f"{name}_token_id": tokenizer.token_to_id(token) for name, token in _NAMED}
        _write(folder / "generation_config.json", ends)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {f"{name}_token": token for name, token in _NAMED}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        _write(folder / "tokenizer_config.json", settings)
        (folder / "chat_template.jinja").write_text(TEMPLATE + "\n", encoding="utf-8")
        _write(folder / "preprocessor_config.json", _PREPROCESSOR)
        _write(
            folder / "processor_config.json",
            {"processor_class": "SmolVLMProcessor", "image_seq_len": TILE_TOKENS},
        )

    def __call__(self, weights: Weights) -> None:
        """Replace the stored weights, atomically."""
        stored = {
            name: weight.detach().bfloat16().contiguous() for name, weight in weights.items() if name != HEAD
        }
        save_file(stored, self.folder / "model.part", metadata={"format": "pt"})
        (self.folder / "model.part").replace(self.folder / "model.safetensors")
        save_file({HEAD: weights[HEAD].detach()}, self.folder / "head.safetensors")


_NAMED = (("bos", START), ("eos", END), ("pad", PAD))
_PREPROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": TILE},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": WIDTH},
}


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def edits(wanted: str, given: str) -> int:
    """Return how many characters to insert, delete or replace to make one text of another."""
    row = list(range(len(given) + 1))
    for i, a in enumerate(wanted, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(given, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def character_errors(folder: Path, desk: Desk, count: int) -> tuple[float, float]:
    """Return the share of wrong characters in texts, and of forms whose JSON is not exact, by transformers.

    Half of the pages are read, the other half are forms that are extracted.
    """
    from PIL import Image

    model = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    wrong = total = inexact = 0
    for number in range(count):
        form = number % 2 == 1
        page = desk.printer.page(4, desk.rng.randint(1, 4), form=form)
        question, answer = (EXTRACT, page.json) if form else (READ, page.text)
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        image = Image.fromarray(page.pixels).convert("RGB")
        inputs = processor(text=prompt, images=[image], return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=len(answer) + 20, do_sample=False)
        text = processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        if form:
            inexact += text != answer
        else:
            wrong, total = wrong + edits(answer, text), total + len(answer)
    return wrong / total, inexact / (count // 2)


def told_characters(folder: Path, desk: Desk, count: int) -> float:
    """Return the share of the characters of pages that the head of the training tells right."""
    weights = load_file(folder / "model.safetensors") | load_file(folder / "head.safetensors")
    reader = Reader(weights, compiled=False)
    pixels, characters, _, _ = desk.tensors(desk.pages(count, 4, (4, 4), 0.5))
    with torch.no_grad():
        told = reader.told(reader.image_states(patches(pixels)), characters.shape[1]).argmax(-1)
    shown = characters.flatten() != 0
    return (told[shown] == characters.flatten()[shown]).float().mean().item()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""fonts, from Debian's packages:
  apt-get download fonts-liberation fonts-freefont-ttf fonts-roboto-unhinted fonts-open-sans fonts-lato \\
      fonts-crosextra-carlito fonts-crosextra-caladea fonts-inconsolata fonts-texgyre fonts-linuxlibertine \\
      fonts-hack fonts-quicksand fonts-cantarell fonts-ebgaramond fonts-dejavu
  for package in *.deb; do dpkg-deb -x $package fonts; done""",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write")
    add(
        "--fonts",
        type=Path,
        action="append",
        required=True,
        help="folder of fonts, several times for several",
    )
    add("--minutes", type=float, default=50, help="time to train for (default %(default)s)")
    add("--init", type=Path, help="folder of an earlier run to train further")
    add("--evaluate", type=int, default=0, metavar="PAGES", help="only measure the model of --out on pages")
    add(
        "--tower-part",
        type=float,
        default=0.25,
        help="part of the time for the tower alone (default %(default)s)",
    )
    add(
        "--alone",
        type=float,
        default=0.5,
        help="share of later steps that train the tower alone; falls to 0 at the end (default %(default)s)",
    )
    add("--tower-layers", type=int, default=4, help="layers of the tower (default %(default)s)")
    add("--tower-ff", type=int, default=256, help="feed-forward size of the tower (default %(default)s)")
    add("--hidden", type=int, default=192, help="hidden size of the decoder (default %(default)s)")
    add("--layers", type=int, default=3, help="layers of the decoder (default %(default)s)")
    add("--kv-heads", type=int, default=1, help="key/value heads (default %(default)s)")
    add("--ff", type=int, default=288, help="feed-forward size of the decoder (default %(default)s)")
    add("--batch", type=int, default=24, help="pages of 64 rows per step (default %(default)s)")
    add("--lr", type=float, default=3e-3, help="full learning rate (default %(default)s)")
    add("--warmup", type=int, default=60, help="steps of the rising learning rate (default %(default)s)")
    add("--decay", type=float, default=0.5, help="part of the time with a falling rate (default %(default)s)")
    add("--max-steps", type=int, default=-1, help="maximum number of steps, for tests (default: no limit)")
    add("--save-every", type=float, default=2, help="minutes between checkpoints (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and pages (default %(default)s)")
    add("--no-compile", action="store_true", help="do not use torch.compile, which needs a C++ compiler")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train a model and write it, or measure one."""
    args = parse(argv)
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    tokenizer = new_tokenizer()
    if args.evaluate:
        for name, held in (("known", False), ("held-out", True)):
            printer = Printer(font_files(args.fonts, held_out=held), words(held_out=True), random.Random(7))
            desk = Desk(printer, tokenizer, random.Random(8))
            told = told_characters(args.out, desk, args.evaluate)
            errors, inexact = character_errors(args.out, desk, args.evaluate)
            print(
                f"{name} fonts, held-out words: {100 * errors:.2f} % of characters wrong, "
                f"{100 * inexact:.1f} % of forms not exact; the head tells {100 * told:.1f} % of characters"
            )
        return
    printer = Printer(font_files(args.fonts, held_out=False), words(held_out=False), rng)
    config = new_config(args, tokenizer)
    weights = new_weights(config, args.seed)
    if args.init:
        weights |= load_file(args.init / "model.safetensors") | load_file(args.init / "head.safetensors")
    print(f"{sum(w.numel() for n, w in weights.items() if n != HEAD) / 1e6:.2f} M parameters", flush=True)
    save = Saver(args.out, config, tokenizer)
    trainer = Trainer(weights, Desk(printer, tokenizer, rng), args)
    steps = trainer.run(save)
    save(trainer.weights)
    print(f"{steps} steps by: train_reader.py {shlex.join(argv or sys.argv[1:])}; held out: {HELD_OUT_FONTS}")


if __name__ == "__main__":
    main()
