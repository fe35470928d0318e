"""A full or broken disk: a one-line error names the file and the reason, and no partial file is left.

Without an error, files survive a power cut: content is on the disk before its name, the name before the end.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from faults import Fault, faulty
from onnx import numpy_helper

from carryall.cli import carryall
from carryall.graph_opt.graph.saving import save_model
from carryall.storage.writing import hide_scratch, save_tensors, writing

FULL = os.strerror(errno.ENOSPC)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 64 kB; the tiny package has 800 kB.

    Its name has the id of this process: mounts of killed ones would keep pytest from deleting their folders.
    """
    for line in Path("/proc/mounts").read_text().splitlines() if sys.platform == "linux" else ():
        name, mounted, *_ = line.split()
        process = name.removeprefix("carryall-test-")
        if process != name and not Path("/proc", process).exists():
            subprocess.run(["umount", "--lazy", mounted], check=False)
    folder = tmp_path_factory.mktemp("disk")
    mount = shutil.which("mount")
    if mount is None or os.name == "nt" or os.geteuid() != 0:
        pytest.skip("only root mounts a small file system")
    command = [mount, "-t", "tmpfs", "-o", "size=64k", f"carryall-test-{os.getpid()}", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(*args: object) -> Result:
    return CliRunner().invoke(carryall, [str(arg) for arg in args])


WRITERS: dict[str, Callable[[Path, Path, Path], list[object]]] = {
    "export": lambda source, package, out: ["export", source, out],
    "export int4": lambda source, package, out: ["export", source, out, "--quantize", "int4-fast"],
    "optimize": lambda source, package, out: ["optimize", package, out],
    "optimize a file": lambda source, package, out: [
        *("optimize", package / "model.onnx", out.with_name("out.onnx"))
    ],
    "quantize": lambda source, package, out: ["quantize", package, out, "--method", "fp16"],
}


@pytest.mark.long
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    writer: str, disk: Path, tiny_checkpoint: Path, tiny_package: Path
) -> None:
    out = disk / "out"
    result = run(*WRITERS[writer](tiny_checkpoint, tiny_package, out))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    name = r"out/(model\.onnx(\.data)?|tokenizer\w*\.json)"
    name = "out.onnx.data" if writer == "optimize a file" else name
    assert re.fullmatch(rf"error: \[Errno {errno.ENOSPC}\] {FULL}: '{disk}/{name}'\n", result.stderr)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.EACCES])
def test_an_output_that_cannot_be_created_is_refused_before_any_work(
    number: int,
    writer: str,
    tiny_checkpoint: Path,
    tiny_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "place"
    if number == errno.ENOTDIR:
        place.touch()
    else:
        place.mkdir()
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place and access(path, mode))

    def work(*_: object, **__: object) -> None:
        pytest.fail("work before the check")

    monkeypatch.setattr("carryall.runtime.tasks.export.export_model", work)
    # Not ``run`` itself: modules that are first imported now would keep the replacement.
    monkeypatch.setattr("carryall.graph_opt.pipeline.pipeline._check_names", work)
    below = place if writer == "optimize a file" else place / "a/b"
    result = run(*WRITERS[writer](tiny_checkpoint, tiny_package, below / "out"))
    if number == errno.ENOTDIR:
        out = below / "out" if writer != "optimize a file" else below / "out.onnx"
        expected = f"error: {out} cannot be created: {place} is not a folder; name a place inside of one\n"
    else:
        expected = f"error: [Errno {number}] {os.strerror(number)}: '{place}'\n"
    assert (result.exit_code, result.stderr) == (2 if number == errno.ENOTDIR else 1, expected)
    assert list(tmp_path.rglob("*")) == [place]


def test_a_full_disk_under_the_cache_is_one_line(
    disk: Path, tiny_checkpoint: Path, tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = disk / "cache"
    monkeypatch.setenv("CARRYALL_CACHE", str(cache))
    result = run("run", tiny_package, "def f", "--max-tokens", "1", "-q")  # a slow machine shows progress
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert f"{FULL} (carryall rm frees some, CARRYALL_CACHE chooses another folder)" in result.stderr
    assert f"'{cache / 'lowered'}/" in result.stderr
    assert "/." not in result.stderr.replace("...", ""), "no temporary name"
    assert list((cache / "lowered").iterdir()) == []
    shutil.rmtree(cache)


def test_a_checkpoint_that_would_fill_the_cache_s_disk_is_refused_before_any_work(
    disk: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = disk / "cache"
    monkeypatch.setenv("CARRYALL_CACHE", str(cache))
    result = run("run", tiny_checkpoint, "def f", "--max-tokens", "1", "-q")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert re.search(rf"writes [\d.]+ .*{cache}.* left", result.stderr)
    written = {path.relative_to(cache).parts[0] for path in cache.rglob("*") if path.is_file()}
    assert written <= {"facts", "hashes"}  # of the files, small
    shutil.rmtree(cache, ignore_errors=True)


def test_a_job_that_cannot_begin_on_a_full_disk_names_its_file(
    disk: Path, tiny_package: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.jsonl").write_text('{"prompt": "def", "max_tokens": 1}\n')
    with (disk / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while rest.write(bytes(4096)):
            pass
    result = run(
        *("batch", "run", tmp_path / "lines.jsonl", "-o", disk / "out.jsonl", "--model", tiny_package)
    )
    (disk / "rest").unlink()
    assert (result.exit_code, result.stdout) == (1, "")
    expected = rf"error: \[Errno {errno.ENOSPC}\] {FULL}: '{disk}/out.jsonl.job/owner.json'\n"
    assert re.fullmatch(expected, result.stderr)
    shutil.rmtree(disk / "out.jsonl.job", ignore_errors=True)


TEMPORARY = {
    "verify": "verify CHECKPOINT PACKAGE --steps 2",
    "optimize --verify": "optimize PACKAGE OUT/x -q --verify",
    "quantize": "quantize PACKAGE OUT/x --method int4 -q",
    "export int4": "export CHECKPOINT OUT/x --quantize int4 -q",
    "a graph": "quantize GRAPH OUT/x.onnx --method int8-dynamic -q",
    "demo": "demo",
}


@pytest.mark.long
@pytest.mark.parametrize("command", TEMPORARY)
def test_a_full_temporary_folder_is_one_line_that_names_its_variable(
    command: str,
    disk: Path,
    tiny_checkpoint: Path,
    tiny_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    weight = numpy_helper.from_array(np.ones((256, 256), np.float32), "w")
    text = '<ir_version: 10, opset_import: ["":21]> g (float[n,256] x) => (float[n,256] y) {y = MatMul(x, w)}'
    graph = onnx.parser.parse_model(text)
    graph.graph.initializer.append(weight)
    onnx.save(graph, tmp_path / "graph.onnx")
    names = {"GRAPH": tmp_path / "graph.onnx", "CHECKPOINT": tiny_checkpoint, "PACKAGE": tiny_package}
    given = TEMPORARY[command].replace("OUT", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    result = run(*(names.get(word, word) for word in given.split()))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    advice = "(TMPDIR chooses the folder of temporary files)"
    assert result.stderr == f"error: [Errno {errno.ENOSPC}] {FULL} {advice}: '{disk}'\n"
    assert list(disk.iterdir()) == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_last_bytes_of_weights_are_not_lost_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ndarray.tofile`` flushes the last 4096 bytes without looking at the result."""
    array = np.ones(300, np.float32)
    text = '<ir_version: 10, opset_import: ["" : 21]> one (float[n] x) => (float[n] y) { y = Identity(x) }'
    model = ir.from_onnx_text(text)
    model.graph.initializers["w"] = ir.Value(name="w", const_value=ir.tensor(array, name="w"))

    def save(model: ir.Model, path: Path, **options: Any) -> None:
        with open("/dev/full", "r+b") as file:
            tensor: Any = model.graph.initializers["w"].const_value
            tensor.tofile(file)

    monkeypatch.setattr(ir, "save", save)
    with pytest.raises(OSError, match=FULL):
        save_model(model, tmp_path / "model.onnx")


def failing(number: int, after: int = 0) -> Callable[..., Any]:
    """Return an operating system function that fails from call number ``after`` on."""
    calls = 0

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(number, os.strerror(number))
            return original(*args, **kwargs)

        return call

    return wrap


FAULTS = {
    "rename": (Path, "rename"),
    "copy": (shutil, "copyfile"),
    "text": (Path, "write_text"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "after"),
    [
        *[(errno.ENOSPC, 0), (errno.EIO, 1)],
        *[
            pytest.param(errno.ENOSPC, 1, marks=pytest.mark.slow),
            pytest.param(errno.EIO, 0, marks=pytest.mark.slow),
        ],
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_any_fault_of_a_writer_leaves_nothing(
    writer: str,
    fault: str,
    after: int,
    number: int,
    tiny_checkpoint: Path,
    tiny_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name = FAULTS[fault]
    monkeypatch.setattr(owner, name, failing(number, after)(getattr(owner, name)))
    arguments = WRITERS[writer](tiny_checkpoint, tiny_package, tmp_path / "out")
    result = run(*arguments)
    monkeypatch.undo()
    if result.exit_code == 0:  # the writer calls it less often
        assert len(list(tmp_path.iterdir())) >= 1
        return
    # A writer that takes over two seconds, on a slow machine, shows its progress first.
    errors = [line for line in result.stderr.splitlines() if not re.search(r": \d+ %", line)]
    assert (result.exit_code, result.stdout, len(errors)) == (1, "", 1)
    assert errors[0].startswith("error: ")
    assert os.strerror(number) in errors[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
@pytest.mark.parametrize("skip", [0, 2])
def test_files_that_cannot_be_written_are_closed(
    skip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every thread that writes, before the garbage collector runs."""
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) {}')
    for name in map("w{}".format, range(20)):
        tensor = ir.tensor(np.ones(500, np.float32), name=name)
        model.graph.initializers[name] = ir.Value(name=name, const_value=tensor)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    gc.collect()
    gc.disable()
    try:
        fault = Fault(tmp_path.resolve(), "write", errno.ENOSPC, skip)
        with faulty(fault), pytest.raises(OSError, match=FULL):
            save_model(model, tmp_path / "m.onnx")
        names = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.lexists(link)]
        assert [name for name in names if str(tmp_path) in name] == []
    finally:
        gc.enable()


def test_an_error_without_a_number_gets_the_disk_s_reason(disk: Path) -> None:
    """NumPy's tofile raises an OSError without a number."""
    with pytest.raises(OSError, match=f"{FULL}: '.*/weights'") as caught, writing(disk / "weights"):
        raise OSError("190080 requested and 12288 written")
    assert caught.value.errno == errno.ENOSPC
    assert list(disk.iterdir()) == []


def test_an_error_without_a_reason_is_of_input_and_output(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Input/output error: '.*/weights'"), writing(tmp_path / "weights"):
        raise OSError("10 requested and 5 written")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limit of the size of files")
def test_tensors_that_have_no_room_get_the_reason_although_their_file_is_deleted(tmp_path: Path) -> None:
    """The limit lets the test write of 1 MiB pass, as a disk does with more room than that."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20, hard))
    try:
        with pytest.raises(OSError, match=f"{os.strerror(errno.EFBIG)}: '.*/w.safetensors'") as caught:
            save_tensors({"w": np.ones(2**20)}, tmp_path / "w.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_temporary_names_are_hidden() -> None:
    error = OSError(errno.EIO, "x", "/a/.tmp/b/c", None, "/a/.tmp")
    hide_scratch(error, Path("/a/.tmp"), Path("/a/out"))
    assert (error.filename, error.filename2) == ("/a/out/b/c", "/a/out")
    error = OSError(errno.EIO, "x", "/a/.tmp2")
    hide_scratch(error, Path("/a/.tmp"), Path("/a/out"))
    assert error.filename == "/a/.tmp2"


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
