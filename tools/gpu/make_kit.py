"""Make the measurement kit for a machine with a GPU and without network: wheels, packed in parts.

    make gpu-kit                                  # .kit/ for compute capability 9.0 and Python 3.12
    python tools/gpu/make_kit.py --capability 80 --python 3.10 --part-mb 50

``.kit/`` then holds part0, part1, ... and manifest.json with their checksums. Bring the parts, in any
number of transfers, and the source tree to the machine, and run ``python tools/gpu/kit.py --parts FOLDER``
there. The machine needs NVIDIA's driver and the libraries of CUDA 13; --with-cuda adds these.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from reduce_onnxruntime import reduce

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "providers/ort/registrations/cuda.txt").read_text().split()[4].rstrip(",")
# What carryall imports for a run of a model; the rest of onnxruntime-gpu's needs is CUDA itself.
NEEDS = """click filelock flatbuffers httptools jinja2 llguidance markupsafe ml_dtypes numpy onnx onnx-ir
    onnxscript packaging platformdirs protobuf psutil rich safetensors sympy mpmath tokenizers
    typing_extensions markdown-it-py mdurl pygments huggingface_hub starlette uvicorn websockets anyio sniffio
    idna h11 prometheus-client grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos
    python-multipart"""
CUDA = """nvidia-cublas nvidia-cuda-runtime nvidia-curand nvidia-cufft nvidia-cudnn-cu13 nvidia-cuda-nvrtc"""
UNUSED = ("tensorrt", "libonnxruntime.so", "transformers", "quantization", "tools", "datasets", "backend")


def download(python: str, names: list[str], folder: Path) -> None:
    """Download wheels for Linux on x86-64."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--python-version", python, "--implementation", "cp", "-d", str(folder)),
            *(word for platform in platforms for word in ("--platform", platform)),
            *names,
        ],
        check=True,
    )


def unpack(wheels: Path, site: Path, capability: int) -> None:
    """Unpack wheels; leave out what runs of models do not need, and the code of other devices."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)  # noqa: S202 -- wheels of a package index
    package = site / "onnxruntime"
    for path in [*package.iterdir(), *(package / "capi").iterdir()]:
        if any(word in path.name for word in UNUSED):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    reduce(package / "capi" / "libonnxruntime_providers_cuda.so", capability)


def pack(site: Path, out: Path, part_bytes: int) -> list[dict[str, object]]:
    """Write a compressed archive in parts; return the name, size and SHA-256 of each."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part*"):
        old.unlink()
    with tempfile.TemporaryFile() as whole:
        zipped = gzip.GzipFile(fileobj=whole, mode="wb", compresslevel=6, mtime=0)
        with zipped, tarfile.open(fileobj=zipped, mode="w|") as archive:
            archive.add(site, arcname="site")
        whole.seek(0)
        parts: list[dict[str, object]] = []
        while content := whole.read(part_bytes):
            name = f"part{len(parts)}"
            (out / name).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            parts.append({"name": name, "bytes": len(content), "sha256": digest})
    return parts


def main() -> None:
    """Make the kit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".kit")
    parser.add_argument("--capability", type=int, default=90, help="of the device: 90 for 9.0")
    parser.add_argument("--python", default="3.12", help="version on the machine")
    parser.add_argument("--part-mb", type=int, default=31, help="most MB of a part")
    parser.add_argument("--with-cuda", action="store_true", help="add NVIDIA's libraries (1.5 GB)")
    parser.add_argument("--with-genai", action="store_true", help="add onnxruntime-genai-cuda")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels to use instead of downloading")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        if chosen.wheels is None:
            names = [f"onnxruntime-gpu=={VERSION}", *NEEDS.split()]
            names += CUDA.split() if chosen.with_cuda else []
            names += ["onnxruntime-genai-cuda"] if chosen.with_genai else []
            download(chosen.python, names, wheels)
        unpack(chosen.wheels or wheels, site, chosen.capability)
        parts = pack(site, chosen.out, chosen.part_mb * 10**6)
    facts = {
        "onnxruntime-gpu": VERSION,
        "capability": chosen.capability,
        "python": chosen.python,
        "parts": parts,
    }
    (chosen.out / "manifest.json").write_text(json.dumps(facts, indent=1) + "\n")
    total = sum(int(str(part["bytes"])) for part in parts)
    print(f"{len(parts)} parts in {chosen.out}, {total / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
