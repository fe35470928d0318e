"""A Ray cluster: connecting to it, and sending folders to its nodes."""

from __future__ import annotations

import io
import shutil
import threading
import time
import zipfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import filelock

from ...errors import MissingExtraError, UsageError
from ...storage.cache import cached_folder
from ...storage.paths import check_name
from ...storage.root import cache_root, unusable
from .stop_signals import sigterm_kept

_COPIED_BYTES = 1 << 20
_SHUTDOWN_SECONDS = 0.2  # after which it is noticed
_KIND, _FOLDER, _LOCK = "shipped", "model", "shipped.lock"

LOCAL = "local"


def ray_module() -> Any:
    """Import and return ray.

    Raises:
        MissingExtraError: ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("a Ray cluster", "ray", "ray") from error
    return ray


def connect(address: str) -> Any:
    """Connect to a cluster, or start one on this machine; return the ray module.

    Raises:
        MissingExtraError: ray is not installed.
        UsageError: there is no cluster at the address.
    """
    ray = ray_module()
    if ray.is_initialized():
        return ray
    try:
        with sigterm_kept():  # Ray's own handler aborts the process
            if address == LOCAL:
                _start_local(ray)
            else:
                ray.init(address=address, log_to_driver=False)
    except Exception as error:  # Ray raises plain ones, too
        raise UsageError(f"there is no Ray cluster at {address}: {error}") from error
    return ray


def _start_local(ray: Any) -> None:
    """Start a cluster on this machine, in a thread that lives as long as it.

    Ray's processes end with the thread that started them (``PR_SET_PDEATHSIG``), and services load models
    in threads that end.
    """
    started: Future[None] = Future()

    def keep() -> None:
        try:
            ray.init(address=LOCAL, log_to_driver=False, include_dashboard=False)
        except BaseException as error:  # noqa: BLE001 -- the caller gets it
            started.set_exception(error)
            return
        started.set_result(None)
        while ray.is_initialized():
            time.sleep(_SHUTDOWN_SECONDS)

    threading.Thread(target=keep, name="carryall-ray", daemon=True).start()
    started.result()


def ship(model: str) -> bytes | None:
    """Return a local folder as a zip archive; None for names that every node resolves, such as hub ids.

    Raises:
        UsageError: the model is a single file, which is not complete without its folder.
    """
    path = Path(model).expanduser()
    check_name(path)
    if path.is_file():
        raise UsageError(f"{model} is a file; a cluster needs the folder with its tokenizer: export it first")
    if not path.is_dir():
        return None
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:  # not compressed: weights would hardly be smaller
        for file in sorted(path.rglob("*")):
            if file.is_file():
                entry = zipfile.ZipInfo(file.relative_to(path).as_posix())  # without the file's time
                with file.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _COPIED_BYTES)
    return stream.getvalue()


def unpacked(name: str, archive: bytes) -> Path:
    """Return the folder of an archive in the cache of this node; the first actor that needs it unpacks it.

    Raises:
        UsageError: the cache cannot be used.
        OSError: a file cannot be written, for instance on a full disk.
    """

    def build(folder: Path) -> None:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            opened.extractall(folder / _FOLDER)

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / _LOCK)
        lock.acquire()  # one actor writes; the others wait for it
    except OSError as error:
        raise unusable(error) from error
    try:
        return cached_folder(_KIND, name, build) / _FOLDER
    finally:
        lock.release()
