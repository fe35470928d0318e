"""``carryall verify``."""

from __future__ import annotations

from pathlib import Path

import click

from ...errors import PackageError, UsageError
from ...exporter.package import Package
from ...graph_opt.compare.bars import Bars
from ...runtime.models.model_source import locate_model
from ...runtime.tasks.verify import MOST_STEPS, verify
from ..options import human_bytes, json_option, print_json
from ..progress import phases
from ..verify_options import bars_options, inputs_option


def check_integrity(model: str, *, as_json: bool) -> None:
    """Read all files of a package, compare them with its record, and print the result.

    Raises:
        UsageError: MODEL is not a package.
        PackageError: a file is damaged.
    """
    path = locate_model(model)
    if not Package.is_package(path):
        raise UsageError(f"{model} is not a package; --integrity needs the record of a package")
    package = Package.unchecked(path)
    integrity = package.integrity()
    sizes = {name: facts.size for name, facts in package.record.files.items()}
    bad = [name for name, problem in integrity.items() if problem]
    if as_json:
        files = [
            {"name": name, "bytes": sizes.get(name), "problem": problem or None}
            for name, problem in integrity.items()
        ]
        print_json({"path": str(path), "passed": not bad, "files": files})
    else:
        width = max(map(len, integrity))
        for name, problem in integrity.items():
            said = problem or f"ok, {human_bytes(sizes[name])}"
            click.echo(f"{name.ljust(width)}  {said}")
    if bad:
        raise PackageError(
            f"{path} is damaged: {len(bad)} of {len(integrity)} files differ from the record "
            f"({', '.join(bad)}); export the model again"
        )
    package.check()


@click.command("verify")
@click.argument("a")
@click.argument("b", required=False)
@click.option("--prompt", help="Text to compare on, tokenized with A's tokenizer. Default: random tokens.")
@inputs_option
@click.option(
    "--steps",
    default=16,
    show_default=True,
    type=click.IntRange(1, MOST_STEPS),
    help="Number of greedy tokens after the prompt.",
)
@bars_options
@click.option(
    "--integrity",
    is_flag=True,
    help="Read all files of the package A, and compare them with its record.",
)
@json_option
def command(
    a: str,
    b: str | None,
    prompt: str | None,
    inputs: Path | None,
    steps: int,
    bars: Bars,
    integrity: bool,
    as_json: bool,
) -> None:
    """Compare two models, or check the files of a package.

    A and B run on the same inputs, on the CPU. Decoders run on tokens: a prompt with A's greedy output, a
    sequence in pieces, a padded batch, and a long KV cache; one may be portable and the other lowered. Their
    next-token distributions must stay within --max-kl. If both compute in float32 and --max-kl is not given,
    logits and caches must stay within --max-error too. Other graphs run on several generated inputs, or on
    those of --inputs, and each output must stay within its bar (tolerance).

    A quantized model differs from its float original by design: set a larger bar for such a pair.

    Exit code 0 if B is within the bars; 1 if it is not, or if a model cannot be read or run; 2 for wrong use.

    \b
    Examples:
        carryall verify demo demo-cpu
        carryall verify demo demo-int4 --max-kl 0.5 --prompt "def main():"
        carryall verify net.onnx net-small.onnx --inputs batch.npz
        carryall verify my-package --integrity
    """
    if integrity:
        if b is not None:
            raise UsageError("--integrity checks one package; omit B")
        check_integrity(a, as_json=as_json)
        return
    if b is None:
        raise click.UsageError(
            "missing argument 'B': the model to compare with A", click.get_current_context()
        )
    with phases(quiet=as_json) as tell:
        found = verify(a, b, prompt=prompt, inputs=inputs, steps=steps, bars=bars, progress=tell)
    click.echo(found.to_json() if as_json else str(found))
    found.check()
