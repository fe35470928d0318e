#!/usr/bin/env python3
"""Write the included calibration text: samples of many kinds, and excerpts of CPython (PSF licence).

Each sample of ``tools/calibration/samples.txt`` (prose, documents, chats, calls of tools, code, tables, ten
languages) is followed by a short excerpt of CPython, so that the first 8,192 tokens hold all of them; the
other excerpts come behind. Excerpts of many files cover a model's activations better than a few long files.
Excerpts that share a line of more than 20 characters with a held-out text are skipped.
"""

import argparse
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SAMPLES = Path(__file__).resolve().parent / "calibration" / "samples.txt"
SEPARATOR = "\n%%\n"
DEMO = Path(__file__).resolve().parent.parent / "exporter" / "demo"
EXCERPT = 1600  # characters, about one window of tokens
SHORT = 400  # characters of an excerpt between two samples
SHARES = {"library": 0.7, "tests": 0.15, "prose": 0.15}
MIN_COPY = 20  # longer lines that also occur in a held-out text count as copies


def excerpts(path: Path, most: int, rng: random.Random) -> Iterator[str]:
    """Yield up to ``most`` excerpts of a file, each from the start of a line, half of them from line 0."""
    lines = path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
    for _ in range(min(most, 1 + sum(map(len, lines)) // 20000)):
        start = rng.choice((0, rng.randrange(len(lines) + 1)))
        piece = ""
        for line in lines[start:]:
            if len(piece) + len(line) > EXCERPT:
                break
            piece += line
        yield piece


def kind(name: Path) -> str:
    """Return the key of SHARES that a file of the library belongs to."""
    if "pydoc_data" in name.parts:
        return "prose"
    return "tests" if {"test", "tests", "idle_test"} & set(name.parts) else "library"


def main() -> None:
    """Collect excerpts of every kind up to ``--characters`` and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--characters", type=int, default=320_000)
    parser.add_argument("--out", type=Path, default=DEMO / "calibration" / "text.txt")
    args = parser.parse_args()
    rng = random.Random(0)
    held = {
        line.strip() for path in DEMO.rglob("heldout.txt") for line in path.read_text("utf-8").splitlines()
    }
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [
        path.relative_to(root) for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts
    ]
    rng.shuffle(names)
    pieces: dict[str, list[str]] = {share: [] for share in SHARES}
    for name in names:
        for piece in excerpts(root / name, 40 if kind(name) == "prose" else 3, rng):
            lines = [line.strip() for line in piece.splitlines() if len(line.strip()) > MIN_COPY]
            if len(piece) > EXCERPT // 4 and not held.intersection(lines):
                pieces[kind(name)].append(piece)
    chosen = [
        piece
        for share, part in SHARES.items()
        for piece in rng.sample(pieces[share], min(len(pieces[share]), int(part * args.characters / EXCERPT)))
    ]
    rng.shuffle(chosen)
    samples = [sample.strip() for sample in SAMPLES.read_text("utf-8").split(SEPARATOR)]
    between = [piece[:SHORT].rpartition("\n")[0] for piece in chosen[: len(samples)]]
    mixed = [text for pair in zip(samples, between, strict=True) for text in pair]
    args.out.write_text("\n\n".join(mixed + chosen[len(samples) :]), encoding="utf-8", newline="")
    print(f"{args.out}: {len(samples)} samples, {len(chosen)} excerpts, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
