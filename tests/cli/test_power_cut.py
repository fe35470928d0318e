"""Files survive a power cut: the content is on the disk before the name, the name before the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from faults import Fault, faulty

from carryall.cli import carryall

COMMANDS = {
    "export": "export CHECKPOINT OUT/x -q",
    "transformers.js": "export CHECKPOINT OUT/x --layout transformers.js -q",
    "optimize": "optimize PACKAGE OUT/x -q",
    "optimize a file": "optimize PACKAGE/model.onnx OUT/x.onnx -q",
    "quantize": "quantize PACKAGE OUT/x --method fp16 -q",
}


def words(command: str, checkpoint: Path, package: Path, out: Path) -> list[str]:
    names = {"CHECKPOINT": checkpoint, "PACKAGE": package, "OUT": out}
    text = COMMANDS[command]
    for name, path in names.items():
        text = text.replace(name, str(path))
    return text.split()


@pytest.mark.skipif(os.name == "nt", reason="names of open files come from /proc; folders have no sync there")
@pytest.mark.parametrize("command", COMMANDS)
def test_files_are_synchronized_before_they_get_their_names(
    command: str,
    tiny_checkpoint: Path,
    tiny_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: dict[int, int] = {}  # size when synchronized, by inode: renaming keeps it
    renamed: list[tuple[Path, set[int]]] = []
    fsync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def noted_replace(source: Any, target: Any, **options: Any) -> None:
        replace(source, target, **options)
        if Path(target).parent == tmp_path:
            renamed.append((Path(target), set(synced)))
            synced.pop(tmp_path.stat().st_ino, None)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    result = CliRunner().invoke(carryall, words(command, tiny_checkpoint, tiny_package, tmp_path))
    assert result.exit_code == 0, result.output
    assert {path for path, _ in renamed} == set(tmp_path.iterdir())
    for target, before in renamed:
        for path in [target, *target.rglob("*")]:
            assert path.stat().st_ino in before, path
            assert path.is_dir() or synced[path.stat().st_ino] == path.stat().st_size, path
    assert tmp_path.stat().st_ino in synced  # the names


@pytest.mark.skipif(os.name == "nt", reason="names of open files come from /proc")
@pytest.mark.parametrize("place", range(4))
def test_a_file_whose_name_is_not_on_the_disk_is_no_graph_without_weights(
    place: int, tiny_checkpoint: Path, tiny_package: Path, tmp_path: Path
) -> None:
    with faulty(Fault(tmp_path, "sync", errno.EIO, skip=place)):
        result = CliRunner().invoke(
            carryall, words("optimize a file", tiny_checkpoint, tiny_package, tmp_path)
        )
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: [Errno {errno.EIO}]")
    assert list(tmp_path.iterdir()) == []
