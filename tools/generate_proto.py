"""Generate the Python code of `proto/*.proto`, or check that the committed code is current.

    python tools/generate_proto.py [--check]

protobuf refuses generated code newer than its runtime. PINNED is the oldest grpcio-tools whose code also
runs on newer runtimes: it writes protobuf 6.31 code, which runs on protobuf 6 and 7. Run it in a separate
environment:

    uv run --no-project --with grpcio-tools==1.74.0 tools/generate_proto.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from pathlib import Path

PINNED = "1.74.0"
PROTO = Path(__file__).resolve().parents[1] / "proto"


def generate(target: Path) -> list[Path]:
    """Write the generated modules to ``target`` and return them.

    Raises:
        RuntimeError: protoc refused a source; it printed the reason.
    """
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as root:
        # The virtual path makes generated modules import each other as carryall.proto.*.
        options = [f"-Icarryall/proto={PROTO}"]
        options += [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
        sources = [f"carryall/proto/{path.name}" for path in sorted(PROTO.glob("*.proto"))]
        if protoc.main(["protoc", *options, *sources]) != 0:
            raise RuntimeError("protoc failed, see above")
        made = [
            path for path in sorted(Path(root, "carryall/proto").iterdir()) if not _is_empty_service(path)
        ]
        return [_copy(path, target / path.name) for path in made]


def stale() -> list[str]:
    """Return the names of committed modules that differ from the generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        made = {path.name: path.read_text() for path in generate(Path(folder))}
    committed = {path.name: path.read_text() for path in PROTO.glob("*_pb2*.py*")}
    return sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))


def _is_empty_service(path: Path) -> bool:
    """Return whether a file is protoc's gRPC module of a source without services."""
    return path.name.endswith("_pb2_grpc.py") and "class " not in path.read_text()


def _copy(source: Path, target: Path) -> Path:
    target.write_text(source.read_text())
    return target


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the code is stale"
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
