"""``carryall quantize`` for ONNX files that are not decoders, calibrated on tensors or images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError
from ..graph_opt.quantize.any_model.images import LAYOUTS, ImageOptions
from ..graph_opt.quantize.any_model.options import IntegerOptions
from ..graph_opt.quantize.recipe import QuantizationRecipe
from ..progress import Progress
from ..runtime.tasks.quantize_any import quantize_any
from .options import print_json

_SETTINGS = ("method", "calibration", "calibrator", "max_error")  # of a recipe, for these models too
Command = Callable[..., Any]


def any_model_options(command: Command) -> Command:
    """Add the options for models that are not decoders; the command gets them as ``any_model``."""
    numbers = _Numbers()
    for option in (
        click.option(
            "--min-snr",
            type=float,
            help="Not for decoders, int8-static: minimum signal-to-noise ratio of every output, in dB.",
        ),
        click.option(
            "--exclude", multiple=True, help="Not for decoders: a weight that stays float. May be repeated."
        ),
        click.option(
            "--dynamic-conv",
            is_flag=True,
            help="Not for decoders, int8-dynamic: quantize convolutions too, which is often slower.",
        ),
        click.option("--image-scale", type=float, help="Factor of pixel values 0 to 255.  [default: 1/255]"),
        click.option(
            "--image-mean", type=numbers, help="Mean that is subtracted from scaled pixels: 0.5,0.5,0.5."
        ),
        click.option("--image-std", type=numbers, help="Standard deviation: divides the difference."),
        click.option("--image-layout", type=click.Choice(LAYOUTS), help="Order of axes.  [default: auto]"),
        click.option("--image-size", type=numbers, help="HEIGHT,WIDTH, if the model does not fix them."),
        click.option("--image-bgr", is_flag=True, help="Channel order blue, green, red."),
    ):
        command = option(command)
    return command


class _Numbers(click.ParamType[tuple[float, ...]]):
    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Convert numbers separated by commas."""
        try:
            return value if isinstance(value, tuple) else tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is not a list of numbers such as 0.5,0.5,0.5", param, ctx)


def check_unused(options: Mapping[str, Any], calibration: str | None) -> None:
    """Check that a decoder has no options for other models.

    Raises:
        UsageError: such an option was given.
    """
    for name, value in options.items():
        if value not in (None, False, ()):
            raise UsageError(f"--{name.replace('_', '-')} is for ONNX files that are not decoders")
    if calibration is not None and Path(calibration).is_dir():
        raise UsageError(f"{calibration} is a folder; a decoder is calibrated on a text")


def quantize_file(
    source: str,
    out: Path,
    settings: Mapping[str, Any],
    *,
    report: Path | None,
    as_json: bool,
    progress: Progress,
    min_snr: float | None,
    exclude: tuple[str, ...],
    dynamic_conv: bool,
    **image: Any,
) -> None:
    """Quantize one ONNX file into another, and print the report.

    Raises:
        UsageError: an option has no effect, the samples do not fit, or the result would be larger.
        OutputExistsError: ``out`` exists.
    """
    for one in dataclasses.fields(QuantizationRecipe):
        if one.name not in _SETTINGS and settings[one.name] != one.default:
            flag = one.name.replace("_", "-")
            raise UsageError(f"--{flag} is for decoders, but {source} is not a decoder")
    options = {
        "calibrator": settings["calibrator"],
        "max_error": settings["max_error"],
        "min_snr": min_snr,
        "exclude": exclude or None,
        "convolutions": dynamic_conv or None,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    result = quantize_any(
        source,
        out,
        settings["method"],
        calibration=settings["calibration"],
        options=IntegerOptions(**chosen) if chosen else None,
        images=_images(image),
        report=report,
        progress=progress,
    )
    if as_json:
        print_json(result.to_dict())
        return
    click.echo(result)


def _images(image: Mapping[str, Any]) -> ImageOptions | None:
    options = {
        name.removeprefix("image_"): value for name, value in image.items() if value not in (None, False)
    }
    if "size" in options:
        if len(options["size"]) != 2 or min(options["size"]) < 1:
            raise UsageError("--image-size must be HEIGHT,WIDTH, such as 224,224")
        options["size"] = tuple(int(side) for side in options["size"])
    return ImageOptions(**options) if options else None
