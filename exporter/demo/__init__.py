"""Small real language models that travel with the project.

Both were trained by ``tools/train_demo_model.py`` on CPython's standard library
and share one tokenizer, so ``draft`` can propose tokens for ``pycoder`` to check.
They exist so that examples, tests and benchmarks can run a model that has learned
something without downloading anything.
"""

from pathlib import Path

__all__ = ["CALIBRATION_TEXT", "NAMES", "demo_path"]

NAMES = ("pycoder", "draft")

# For calibration where the user gives no text: from CPython's library and its documentation (PSF licence).
# None of it is in a model's heldout.txt.
CALIBRATION_TEXT = Path(__file__).resolve().parent / "calibration" / "text.txt"


def demo_path(name: str = "pycoder") -> Path:
    """Return the folder (Hugging Face layout) of the demo model called ``name``."""
    if name not in NAMES:
        raise ValueError(f"no demo model is called {name!r}; the known names are {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / name
