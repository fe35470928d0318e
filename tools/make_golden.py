"""Write tests/exporter/golden: the results of transformers for every family case.

Needs torch and transformers: python tools/make_golden.py [CASE ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kits" / "checkpoints"))

from exporter_golden import golden_path, transformers_answer
from family_cases import CASES, GOLDEN_OF, write_case

MIN_MARGIN = 1e-3  # ten times the tolerance of the tests, so that rounding cannot change a greedy token


def main() -> None:
    """Write the golden files of the cases in argv, or of all."""
    for case in sys.argv[1:] or sorted(set(CASES) - set(GOLDEN_OF)):
        with tempfile.TemporaryDirectory() as folder:
            answer = transformers_answer(write_case(case, Path(folder)))
        margin, distinct = float(answer["margin"]), len(np.unique(answer["tokens"]))
        print(f"{case}: smallest margin {margin:.1e}, {distinct} distinct tokens")
        if margin < MIN_MARGIN:
            raise SystemExit(
                f"{case}: the margin {margin:.1e} is below {MIN_MARGIN:g}; give the case another seed"
            )
        path = golden_path(case)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **{key: value for key, value in answer.items() if key != "margin"})


if __name__ == "__main__":
    main()
