"""Write the calibration text of all tools as windows of tokens: FOLDER/windows.npz."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from carryall.runtime.models.calibration import calibration_windows
from carryall.runtime.text.tokenizer import Tokenizer

folder = Path(sys.argv[1])
np.savez(folder / "windows.npz", *calibration_windows(Tokenizer(folder / "float"), None, context_length=1024))
