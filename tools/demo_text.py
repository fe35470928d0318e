"""Prepare the training text of the demo models: CPython's standard library without held-out files."""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS = 0, 1
# Files that are not trained on, fixed by name so that figures of different runs are comparable.
# fmt: off
HELD_OUT = (
    "unittest/suite.py", "encodings/iso8859_14.py", "fnmatch.py", "idlelib/stackviewer.py",
    "idlelib/percolator.py", "ctypes/macholib/dylib.py", "lib2to3/pgen2/literals.py",
    "lib2to3/fixes/fix_exec.py", "distutils/config.py", "struct.py", "__phello__/__init__.py", "pprint.py",
    "encodings/cp875.py", "_threading_local.py", "xmlrpc/__init__.py", "email/contentmanager.py",
    "netrc.py", "quopri.py", "distutils/log.py", "turtledemo/peace.py", "dbm/ndbm.py", "xml/sax/handler.py",
    "email/mime/image.py", "distutils/command/bdist_rpm.py", "tkinter/colorchooser.py",
)
# fmt: on


def read_sources() -> tuple[list[str], list[str], list[str]]:
    """Return the held-out texts, the library's texts, and the texts of tests and code tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8", errors="ignore")
        for path in sorted(root.rglob("*.py"))
        if "site-packages" not in path.parts
    }
    held = [texts.pop(name) for name in HELD_OUT if name in texts]
    held_lines = [lines_of(text) for text in held]
    library: list[str] = []
    others: list[str] = []
    for name, text in texts.items():
        lines = lines_of(text)
        if lines and not any(len(lines & some) >= 0.5 * len(lines | some) for some in held_lines):
            minor = {"test", "tests", "idle_test", "encodings"} & set(name.split("/"))
            (others if minor else library).append(text)
    return held, library, others


def lines_of(text: str) -> set[str]:
    """Return the distinct lines of a text with more than 3 characters."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) > 3}


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|bos|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """Return the token ids of every text, between a start and an end token."""
    return [torch.tensor([BOS, *encoding.ids, EOS]) for encoding in tokenizer.encode_batch(texts)]


def cut(text: str, share: float, rng: random.Random) -> list[str]:
    """Split a text at a fraction ``share`` of its lines, before the line or inside it.

    The tokenizer joins a line's end with the next line's indent. Text tokenized in pieces teaches the
    network to continue prompts that stop at a line's end or in the middle of a word.
    """
    pieces = [""]
    for line in text.splitlines(keepends=True):
        if rng.random() < share:
            at = rng.choice((0, rng.randrange(len(line))))
            pieces[-1] += line[:at]
            pieces.append(line[at:])
        else:
            pieces[-1] += line
    return pieces


def encode_cut(tokenizer: Tokenizer, texts: list[str], share: float, rng: random.Random) -> list[Tensor]:
    """Return the token ids of every text; its pieces are tokenized one by one."""
    files = []
    for text in texts:
        encodings = tokenizer.encode_batch(cut(text, share, rng))
        files.append(torch.tensor([BOS, *(token for e in encodings for token in e.ids), EOS]))
    return files


def batches(files: list[Tensor], length: int, batch: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield batches of length + 1 tokens without end, reshuffling files and cuts every epoch."""
    while True:
        rng.shuffle(files)
        stream = torch.cat(files)[rng.randrange(length) :]
        starts = list(range(0, len(stream) - length, length))
        if len(starts) < batch:
            raise ValueError(
                f"the text has {len(starts)} windows of {length} tokens, fewer than a batch of {batch}"
            )
        rng.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            yield torch.stack([stream[s : s + length + 1] for s in starts[i : i + batch]])
