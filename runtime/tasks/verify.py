"""``carryall.verify``: compare the results of two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import IMAGE_STATES, INPUT_IDS
from ...errors import UsageError
from ...exporter.image_processor import IMAGE_PROCESSOR_FILE, read_image_processor
from ...exporter.package import TEXT_ENCODER_FILE, TOKENIZER_FILE, VISION_FILE, Package
from ...graph_opt.compare.bars import Bars
from ...graph_opt.compare.report import VerifyReport
from ...graph_opt.compare.verify import verify as verify_graphs
from ...graph_opt.graph.load import load_model
from ...progress import Progress, phase
from ...records import dataclass
from ...reports import Report
from ...storage.scratch import scratch_folder
from ..models.find import side_folder
from ..models.graphs import graph_file, stated_context
from ..models.model_source import locate_model
from ..models.sight import open_tower
from ..text.tokenizer import Tokenizer
from ..types.arguments import checked_arguments

Tensors = Mapping[str, npt.NDArray[Any]]

MOST_STEPS = 100_000
_SIZES = ((64, 96), (120, 50), (33, 33))  # of the pictures that towers are compared on
_TEXT, _STATES = 8, 5  # tokens, and states of a picture in front of them
_MOST_UNITS = 2  # of each picture, since a unit may take seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport(Report):
    """The result of comparing two models.

    Attributes:
        found: the differences of each output, the inputs, and the bars (tolerances).
        tower: the same of ``vision.onnx`` and ``text_encoder.onnx``; None unless both are packages that see.
    """

    found: VerifyReport
    tower: VerifyReport | None = None

    @property
    def passed(self) -> bool:
        """Whether the differences stay within the bars."""
        return all(report.passed for report in self._reports)

    @property
    def reason(self) -> str | None:
        """Which bar is exceeded, and by how much; None if none is."""
        return next((report.reason for report in self._reports if report.reason), None)

    @property
    def _reports(self) -> list[VerifyReport]:
        return [self.found] if self.tower is None else [self.found, self.tower]

    def check(self) -> None:
        """Raise an error if a bar is exceeded.

        Raises:
            VerificationError: a bar is exceeded.
        """
        for report in self._reports:
            report.check()

    def to_dict(self) -> dict[str, Any]:
        tower = {} if self.tower is None else {"tower": self.tower.to_dict()}
        passed = {"passed": self.passed} if tower else {}
        return {**self.found.to_dict(), **passed, **tower}

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("reference", self.found.reference),
            ("candidate", self.found.candidate),
            ("result", "passed" if self.reason is None else f"failed: {self.reason}"),
            ("differences", str(self)),
        ]

    def __str__(self) -> str:
        text = self.found.text()
        return text if self.tower is None else f"{text}\n{VISION_FILE}: {self.tower.text()}"


@checked_arguments
def verify(
    reference: str | Path,
    candidate: str | Path,
    *,
    prompt: str | None = None,
    inputs: str | Path | Tensors | None = None,
    steps: int = 16,
    bars: Bars | None = None,
    progress: Progress | None = None,
) -> VerificationReport:
    """Compare the results of two models on the same inputs, on the CPU.

    Decoders run on a prompt with the greedy output of ``reference``, a sequence in pieces, a padded batch and
    a long cache. Other graphs run on several generated inputs. If both are packages that see, their
    ``vision.onnx`` run on generated pictures too. See ``docs/verification.md``.

    Args:
        reference: the reference model: a package, a checkpoint, an ONNX file, or ``demo``.
        candidate: the model to check; one of both may be portable and the other lowered.
        prompt: text for decoders, tokenized with the reference's tokenizer; random tokens by default.
        inputs: tensors by input name, an .npz file of them, or a folder of such files.
        steps: number of greedy tokens after the prompt.
        bars: the tolerances; by default they follow from the arithmetic of both graphs.
        progress: called for the runs, in the phase ``verify``.

    Returns:
        The report; its ``check`` raises VerificationError if the models differ by more than the bars.

    Raises:
        UsageError: a model does not exist, the inputs do not fit, or the vocabularies differ.
        GraphError: a graph cannot be read or run.
    """
    if prompt is not None and inputs is not None:
        raise UsageError("give either a prompt or inputs")
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"steps must be from 1 to {MOST_STEPS}, not {steps}")
    names = str(reference), str(candidate)
    prompts = None if prompt is None else [_tokenize(side_folder(locate_model(reference)), prompt)]
    with scratch_folder() as scratch:
        files = graph_file(names[0], scratch / "a"), graph_file(names[1], scratch / "b")
        report = verify_graphs(
            *files,
            Path(inputs) if isinstance(inputs, str) else inputs,
            bars,
            prompts=prompts,
            steps=steps,
            context_length=stated_context(*names),
            names=names,
            progress=phase(progress, "verify"),
        )
    tower = None if inputs is not None else _tower_report(names, bars, phase(progress, "verify pictures"))
    return VerificationReport(found=report, tower=tower)


def _tower_report(names: tuple[str, str], bars: Bars | None, progress: Progress) -> VerifyReport | None:
    """Return the comparison of two packages' ``vision.onnx`` on the same pictures; None if one has none.

    Raises:
        UsageError: they prepare pictures differently.
    """
    paths = [locate_model(name) for name in names]
    if not all(Package.is_package(path) and Package.open(path).sees for path in paths):
        return None
    first, second = (read_image_processor(path / IMAGE_PROCESSOR_FILE) for path in paths)
    if first != second:
        raise UsageError(
            f"{names[0]} and {names[1]} prepare pictures differently: their {IMAGE_PROCESSOR_FILE} differ"
        )
    encoder = open_tower(paths[0], session=None)
    rng = np.random.default_rng(0)
    pictures = [encoder.prepare(rng.integers(0, 256, (*size, 3), np.uint8)) for size in _SIZES]
    report = verify_graphs(
        paths[0] / VISION_FILE,
        paths[1] / VISION_FILE,
        [encoder.feeds(picture.prepared.units[:_MOST_UNITS]) for picture in pictures],
        bars,
        names=(f"{names[0]}: {VISION_FILE}", f"{names[1]}: {VISION_FILE}"),
        progress=progress,
    )
    reader, other = (path / TEXT_ENCODER_FILE for path in paths)
    if not reader.is_file():
        return report
    shape = load_model(reader).graph.inputs[0].shape
    width = None if shape is None else shape[-1]
    if not isinstance(width, int):
        raise UsageError(f"{names[0]} is damaged: {TEXT_ENCODER_FILE} states no width of its rows")
    states = rng.standard_normal((_STATES, width)).astype(np.float32)
    read = verify_graphs(
        reader,
        other,
        [{IMAGE_STATES: states, INPUT_IDS: np.arange(_TEXT)}],
        bars,
        names=(f"{names[0]}: {TEXT_ENCODER_FILE}", f"{names[1]}: {TEXT_ENCODER_FILE}"),
        progress=progress,
    )
    return dataclasses.replace(
        report, outputs={**report.outputs, **read.outputs}, inputs=(*report.inputs, *read.inputs)
    )


def _tokenize(model: Path, text: str) -> list[int]:
    path = model / TOKENIZER_FILE
    if not path.is_file():
        raise UsageError(
            f"--prompt needs a tokenizer, but {model} has none; omit --prompt to use random tokens"
        )
    tokens: list[int] = Tokenizer(model).encode(text)
    if not tokens:
        raise UsageError("--prompt is empty")
    return tokens
