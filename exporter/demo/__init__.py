"""Three small trained models that ship with the package, for examples, tests and benchmarks.

``pycoder`` and ``draft`` were trained by ``tools/train_demo_model.py`` on CPython's standard library. They
share one tokenizer, so that ``draft`` can propose tokens for ``pycoder``. ``reader`` reads pictures of lines
and forms; it was trained by ``tools/train_reader.py``.
"""

from pathlib import Path

__all__ = ["CALIBRATION_TEXT", "NAMES", "demo_path"]

NAMES = ("pycoder", "draft", "reader")

# Calibration text if the user gives none: from CPython's library and its documentation (PSF licence).
# It does not overlap with the models' heldout.txt.
CALIBRATION_TEXT = Path(__file__).resolve().parent / "calibration" / "text.txt"


def demo_path(name: str = "pycoder") -> Path:
    """Return the Hugging Face folder of the demo model ``name``.

    Raises:
        ValueError: no demo model has that name.
    """
    if name not in NAMES:
        raise ValueError(f"no demo model is named {name!r}; the names are {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / name
