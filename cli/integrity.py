"""``carryall verify PACKAGE --integrity``."""

from __future__ import annotations

import click

from ..errors import PackageError, UsageError
from ..exporter.package import Package
from ..runtime.models.model_source import locate_model
from .options import human_bytes, print_json


def check_integrity(model: str, *, as_json: bool) -> None:
    """Read all files of a package, compare them with its record, and print the result.

    Raises:
        UsageError: MODEL is not a package.
        PackageError: a file is damaged.
    """
    path = locate_model(model)
    if not Package.is_package(path):
        raise UsageError(f"{model} is not a package; --integrity needs the record of a package")
    package = Package.unchecked(path)
    integrity = package.integrity()
    sizes = {name: facts.size for name, facts in package.record.files.items()}
    bad = [name for name, problem in integrity.items() if problem]
    if as_json:
        files = [
            {"name": name, "bytes": sizes.get(name), "problem": problem or None}
            for name, problem in integrity.items()
        ]
        print_json({"path": str(path), "passed": not bad, "files": files})
    else:
        width = max(map(len, integrity))
        for name, problem in integrity.items():
            said = problem or f"ok, {human_bytes(sizes[name])}"
            click.echo(f"{name.ljust(width)}  {said}")
    if bad:
        raise PackageError(
            f"{path} is damaged: {len(bad)} of {len(integrity)} files differ from the record "
            f"({', '.join(bad)}); export the model again"
        )
    package.check()
