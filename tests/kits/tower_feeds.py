"""What the encoder of a package feeds to its tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seeing_golden import pictures

from carryall.contract import IMAGE_STATES
from carryall.exporter.image_processor import IMAGE_PROCESSOR_FILE, read_image_processor
from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.images.encoding import ImageEncoder


def feeds_of(package: Path) -> list[Any]:
    """Return the inputs of each run for two pictures, whose units have one shape in a run."""
    found: list[Any] = []

    def keep(feeds: Any) -> Any:
        found.append(dict(feeds))
        return reference.run([IMAGE_STATES], dict(feeds))[0]

    provider = get_provider("cpu")
    reference = provider.session(package / "vision.onnx", provider.resolve_options(RunnerConfig()))
    encoder = ImageEncoder(read_image_processor(package / IMAGE_PROCESSOR_FILE), keep)
    for each in pictures():
        encoder.states(encoder.prepare(each))
    return found
