"""``carryall rerank``."""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import UsageError
from ...exporter.encoders.modules import POOLING_NAMES
from ...runtime.api.load_encoder import encoder_folder, load_encoder
from ..lines import given_lines, lines_option
from ..options import json_option, print_json
from ..sections import SectionedCommand


@click.command("rerank", cls=SectionedCommand)
@click.argument("model")
@click.argument("query")
@click.argument("documents", nargs=-1)
@lines_option("Rank the lines of a file.")
@click.option("--top", type=click.IntRange(1), help="Print the best only.")
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
@json_option
def command(
    model: str,
    query: str,
    documents: tuple[str, ...],
    lines: Path | None,
    top: int | None,
    truncate: bool,
    pooling: str | None,
    normalize: bool | None,
    provider: str,
    as_json: bool,
) -> None:
    """Print documents by how well they answer a query, the best first.

    MODEL is a package of a classifier with one label, which scores pairs, or of an encoder, whose vectors, or
    vectors of tokens (ColBERT), are compared.

    \b
    Example:
        carryall rerank reranker "Where is Paris?" "Paris is in France." "Cats sleep."
        carryall rerank reranker "Where is Paris?" --lines documents.txt --top 5
    """
    from ...runtime.api.token_classifier import TokenClassifier  # imports onnxruntime

    texts = given_lines(documents, lines)
    given = {"pooling": pooling, "normalize": normalize}
    options = {name: value for name, value in given.items() if value is not None}
    encoder = load_encoder(encoder_folder(model) or Path(model), provider, options, warm_up=False)
    if isinstance(encoder, TokenClassifier):
        raise UsageError(f"{model} classifies tokens; it does not rank")
    scores = encoder.rerank(query, texts, truncate=truncate)
    order = sorted(range(len(texts)), key=lambda place: -scores[place])[:top]
    if as_json:
        print_json([{"index": place, "score": scores[place], "text": texts[place]} for place in order])
        return
    for place in order:
        click.echo(f"{scores[place]:.4f}  {texts[place]}")
