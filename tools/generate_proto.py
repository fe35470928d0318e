"""Generate the Python code of the `.proto` files below `proto/`, or check that the committed code is current.

    python tools/generate_proto.py [--check | --release]

protobuf refuses generated code newer than its runtime. PINNED is the oldest grpcio-tools whose code also
runs on newer runtimes: it writes protobuf 6.31 code, which runs on protobuf 6 and 7. Run it in a separate
environment:

    uv run --no-project --with grpcio-tools==1.74.0 tools/generate_proto.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import tempfile
from pathlib import Path

PINNED = "1.74.0"
PROTO = Path(__file__).resolve().parents[1] / "proto"
BASELINE = PROTO / "baseline.binpb"
# protoc writes imports by the path below proto/; the generated modules lie side by side in carryall.proto.
OWN_IMPORT = re.compile(r"^from (?!google)[\w.]+ import (\w+_pb2)", re.MULTILINE)
OWN_NAME = re.compile(r"(BuildTopDescriptorsAndMessages\(DESCRIPTOR, ')[\w.]+\.(\w+_pb2)'")


def sources() -> list[str]:
    """Paths of the sources, relative to `proto/`."""
    return sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))


def generate(target: Path) -> list[Path]:
    """Write the generated modules to ``target`` and return them.

    Raises:
        RuntimeError: protoc refused a source; it printed the reason.
    """
    with tempfile.TemporaryDirectory() as root:
        _protoc([f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")], sources())
        made = [path for path in sorted(Path(root).rglob("*_pb2*")) if not _is_empty_service(path)]
        return [_adopt(path, target / path.name) for path in made]


def write_baseline() -> None:
    """Save the descriptors of `carryall.v1`, with which later versions must stay compatible."""
    own = [source for source in sources() if source.startswith("carryall/")]
    _protoc([f"--descriptor_set_out={BASELINE}"], own)


def stale() -> list[str]:
    """Return the names of committed modules that differ from the generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        made = {path.name: path.read_text() for path in generate(Path(folder))}
    committed = {path.name: path.read_text() for path in PROTO.glob("*_pb2*.py*")}
    return sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))


def _protoc(options: list[str], files: list[str]) -> None:
    from grpc_tools import protoc

    if protoc.main(["protoc", f"-I{PROTO}", *options, *files]) != 0:
        raise RuntimeError("protoc failed, see above")


def _is_empty_service(path: Path) -> bool:
    """Return whether a file is protoc's gRPC module of a source without services."""
    return path.name.endswith("_pb2_grpc.py") and "class " not in path.read_text()


def _adopt(source: Path, target: Path) -> Path:
    text = OWN_IMPORT.sub(r"from carryall.proto import \1", source.read_text())
    target.write_text(OWN_NAME.sub(r"\1carryall.proto.\2'", text))
    return target


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the code is stale")
    parser.add_argument(
        "--release", action="store_true", help="make the sources the baseline of compatibility"
    )
    arguments = parser.parse_args()
    found = importlib.metadata.version("grpcio-tools")
    if found != PINNED:
        print(
            f"grpcio-tools {found} is installed, but {PINNED} is required: "
            f"uv run --no-project --with grpcio-tools=={PINNED} tools/generate_proto.py",
            file=sys.stderr,
        )
        return 2
    if arguments.release:
        write_baseline()
    if not arguments.check:
        for path in generate(PROTO):
            print(path)
        return 0
    names = stale()
    if names:
        print(f"stale, run this without --check: {', '.join(names)}", file=sys.stderr)
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
