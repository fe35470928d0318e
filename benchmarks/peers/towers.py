"""Processor time of the tower for a page of 1,000 x 700 pixels, in each form, and in OpenVINO.

    python benchmarks/peers/towers.py PACKAGE --rounds 2 --openvino PYTHON

PACKAGE sees; random weights will do. The forms run in turns on one thread. PYTHON is the interpreter of an
environment with openvino and NumPy, which runs the package's portable ``vision.onnx`` at its defaults.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carryall.providers import get_provider
from carryall.providers.base import RunnerConfig
from carryall.runtime.images.encoding import ImageEncoder
from carryall.runtime.models.sight import open_tower
from carryall.runtime.models.tower_graph import tower_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))
from page_work import PageWork

FORMS = ("float32", "bfloat16", "int8")
_OPENVINO = """
import sys, time, numpy as np, openvino as ov
model = ov.Core().compile_model(sys.argv[1], "CPU", {"INFERENCE_NUM_THREADS": 1})
names = {name for each in model.inputs for name in each.get_names()}
feeds = {name: array for name, array in np.load(sys.argv[2]).items() if name in names}
for _ in range(int(sys.argv[3])):
    start = time.process_time()
    model(feeds)
    print(f"| OpenVINO {ov.__version__.split("-")[0]} | {time.process_time() - start:.2f} s | |", flush=True)
"""


def opened(package: Path, form: str) -> ImageEncoder:
    """Open the tower in a form."""
    provider = get_provider("cpu")
    config = provider.resolve_options(RunnerConfig(options={"tower": form}, num_threads=1))
    graph = tower_graph(package / "vision.onnx", provider, config)
    return open_tower(package, provider.session(graph, config))


def main() -> None:
    """Run the forms in turns and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path, help="an exported model that sees")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--openvino", help="interpreter of an environment with openvino and NumPy")
    args = parser.parse_args()
    encoders = {form: opened(args.package, form) for form in FORMS}
    first = next(iter(encoders.values()))
    picture = first.prepare(PageWork("page", 0).pixels())
    feeds = first.feeds(picture.prepared.units)
    print(f"{len(feeds['pixels'])} patches\n\n| form | processor time | states beside {FORMS[0]} |")
    print("| --- | --- | --- |")
    exact: npt.NDArray[np.float32] | None = None
    for number in range(args.rounds):
        for form, encoder in encoders.items():
            start = time.process_time()
            states = encoder.states(picture, salt=str(number))  # a salt of its own: nothing is known
            seconds = time.process_time() - start
            exact = states if exact is None else exact
            error = float(np.linalg.norm(states - exact) / np.linalg.norm(exact))
            print(f"| {form} | {seconds:.2f} s | {100 * error:.2f} % |", flush=True)
    if args.openvino:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "feeds.npz"
            arrays: dict[str, Any] = dict(feeds)
            np.savez(file, **arrays)
            model = args.package / "vision.onnx"
            command = [args.openvino, "-c", _OPENVINO, str(model), str(file), str(args.rounds)]
            subprocess.run(command, check=True)
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
