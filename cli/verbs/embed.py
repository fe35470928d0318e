"""``carryall embed``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import numpy as np

from ...errors import UsageError
from ...exporter.encoders.modules import POOLING_NAMES
from ...runtime.api.load_encoder import encoder_folder
from ...storage.paths import check_target
from ...storage.writing import hiding_scratch, publish, writing
from ..lines import given_lines, lines_option
from ..options import MOST_TOKENS, print_json
from ..pictures import PictureFile, image_option
from ..sections import SectionedCommand


@click.command("embed", cls=SectionedCommand)
@click.argument("model")
@click.argument("texts", nargs=-1)
@lines_option("Embed each line of a file.")
@image_option("A picture to embed behind the texts, for models of texts and pictures; repeat it for several.")
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Write an .npy file.  [default: lines of JSON]"
)
@click.option("--prompt-name", metavar="NAME", help="Put this prompt of the model before each text.")
@click.option("--dimensions", type=click.IntRange(1, MOST_TOKENS), help="Keep the first elements only.")
@click.option(
    "--kind",
    type=click.Choice(["dense", "sparse", "multi"]),
    default="dense",
    show_default=True,
    help="One vector for a text, weights of terms, or a vector for each token.",
)
@click.option(
    "--late-chunking", is_flag=True, help="The texts are pieces of one document, which is read whole."
)
@click.option("--truncate", is_flag=True, help="Cut texts that are too long, instead of refusing them.")
@click.option(
    "--pooling",
    type=click.Choice(list(POOLING_NAMES)),
    help="How states of tokens become a vector.  [default: as the folder says]",
)
@click.option(
    "--normalize/--no-normalize", default=None, help="Vectors of length 1.  [default: as the folder says]"
)
@click.option("--provider", default="cpu", show_default=True, help="Where the model runs.")
def command(
    model: str,
    texts: tuple[str, ...],
    lines: Path | None,
    images: tuple[PictureFile, ...],
    output: Path | None,
    prompt_name: str | None,
    dimensions: int | None,
    kind: str,
    late_chunking: bool,
    truncate: bool,
    pooling: str | None,
    normalize: bool | None,
    provider: str,
) -> None:
    """Print the vectors of texts and pictures, one line of JSON for each.

    MODEL is a package or a checkpoint folder of an encoder, a folder of sentence-transformers, or an export
    of Optimum, transformers.js or fastembed with its tokenizer: the folder, or one of its ONNX files. For CSV
    and Parquet files, and for jobs that resume, see 'carryall batch run --as embedding'.

    \b
    Example:
        carryall embed minilm "first text" "second text"
        carryall embed minilm --lines texts.txt -o vectors.npy
        carryall embed clip "a photo of a cat" --image cat.png
    """
    from ...runtime.api.text_encoder import TextEncoder  # imports onnxruntime

    only_pictures = bool(images) and not texts and lines is None
    inputs: list[Any] = [] if only_pictures else list(given_lines(texts, lines))
    inputs += [image.part for image in images]
    if output is not None and (output.suffix != ".npy" or kind != "dense"):
        raise UsageError(f"{output}: -o writes dense vectors to an .npy file; omit it for lines of JSON")
    if dimensions is not None and kind != "dense":
        raise UsageError(f"--dimensions is for dense vectors, not for --kind {kind}")
    if late_chunking and kind != "dense":
        raise UsageError(f"--late-chunking is for dense vectors, not for --kind {kind}")
    encoder = TextEncoder(
        encoder_folder(model) or Path(model), providers=[provider], pooling=pooling, normalize=normalize
    )
    options: dict[str, Any] = {"prompt": prompt_name, "truncate": truncate}
    if kind == "sparse":
        for vector in encoder.embed_sparse(inputs, **options):
            print_json({"indices": vector.indices.tolist(), "values": vector.values.tolist()})
        return
    if kind == "multi":
        for rows in encoder.embed_tokens(inputs, **options):
            print_json(rows.tolist())
        return
    vectors = encoder.embed(inputs, dimensions=dimensions, late_chunking=late_chunking, **options)
    if output is not None:
        _write(output, vectors)
        return
    for row in vectors:
        print_json(row.tolist())


def _write(path: Path, vectors: Any) -> None:
    """Write an array so that the file is as before, or missing, if that fails."""
    check_target(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with hiding_scratch(scratch, path), writing(path):
            with scratch.open("wb") as file:
                np.save(file, vectors)
            publish(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
