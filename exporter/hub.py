"""Download models from the Hugging Face hub, and list and delete what was downloaded."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError
from ..records import dataclass
from ..reports import human_bytes
from ..storage.paths import stays_inside
from .config.genai import GENAI_FILE
from .gguf.file import is_projector, shard_stem
from .header_files import write_header

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<part>[\w./ -]+))?")
_PARTIAL = 206  # the status of an answer to a request for a range
_SIDE = ("*.json", "*.jinja")
# The types of GGUF files, the best compromise of size and quality first: a machine takes the first that fits.
_BEST = (
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K_L", "Q3_K_M", "Q3_K_S"),
    *("IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K"),
    *("Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "BF16", "F16", "F32"),
    *("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
_GGUF_TYPE = re.compile(r"(?P<stem>.+)[.-](?P<type>I?Q\d\w*|MXFP4|BF16|F16|F32)", re.IGNORECASE)
# The types of vision towers of GGUF files, the first of which is taken: most are published as F16.
_TOWERS = ("F16", "BF16", "F32", "Q8_0")
_ROOM = 1.25  # memory that a model takes, in bytes of its file: weights, KV and activations

Sizes = Mapping[str, int | None]  # of the files of a repository, by name


def fits(size: float, memory: float) -> bool:
    """Return whether a file of so many bytes runs in so many bytes of memory, about."""
    return size * _ROOM <= memory


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form ``org/name[@revision][:part]``."""
    return _HUB_ID.fullmatch(name) is not None


def download(hub_id: str, memory: int | None = None) -> Path:
    """Download a model into huggingface_hub's cache, unless it is cached, and return its folder or file.

    Args:
        hub_id: ``org/name[@revision][:part]``; ``part`` is a subfolder, a file, or what tells several files
            apart: ``q4`` for ``onnx/model_q4.onnx``, ``Q4_K_M`` for ``Name-Q4_K_M.gguf``.
        memory: bytes that a model may take, which decide between several GGUF files of one model; None is
            no limit.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ModelNotFoundError: the id is malformed, there is no such model, or the hub cannot be reached.
    """
    repo = _Repository.named(hub_id)
    with repo.errors():
        return _fetched(hub_id, repo.part, repo.sizes, repo.fetch, memory)


def download_headers(hub_id: str, folder: Path, memory: int | None = None) -> Path:
    """Write a model of which only the headers are downloaded, and return its folder or file.

    Files of weights are as long as on the hub, and empty behind their headers, so that what reads headers
    reads them as it would the whole model. Other files are whole.

    Args:
        hub_id: as for ``download``.
        folder: where the files go.
        memory: as for ``download``.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ModelNotFoundError: as for ``download``.
        UnsupportedModelError: the model is an ONNX graph, which has no headers.
    """
    repo = _Repository.named(hub_id)
    with repo.errors():
        sizes = repo.sizes()
        place, wanted = choose(sizes, repo.part, hub_id, memory)
        for name in wanted:
            if name.endswith((".onnx", ".onnx_data", ".data")):
                raise UnsupportedModelError(
                    f"{hub_id} is an ONNX graph, which must be downloaded: carryall pull"
                )
            write_header(folder / name, sizes[name] or 0, partial(repo.part_of, name))
    return folder / place


class _Repository:
    """One repository of the hub."""

    def __init__(self, hub_id: str, repo: str, revision: str | None, part: str | None) -> None:
        self._hub_id, self._repo, self._revision, self.part = hub_id, repo, revision, part
        self._commit = revision  # that of the sizes, so that the parts of files belong together

    @staticmethod
    def named(hub_id: str) -> _Repository:
        """Return the repository of a hub id.

        Raises:
            MissingExtraError: huggingface_hub is not installed.
            ModelNotFoundError: the id is malformed.
        """
        match = _HUB_ID.fullmatch(hub_id)
        if match is None or not all(stays_inside(match[name] or "x") for name in ("revision", "part")):
            raise ModelNotFoundError(f"'{hub_id}' is not a hub id; use org/name[@revision][:part]")
        try:
            import huggingface_hub  # noqa: F401 -- an extra
        except ImportError as error:
            raise MissingExtraError(f"the hub model '{hub_id}'", "huggingface_hub", "hub") from error
        return _Repository(hub_id, match["repo"], match["revision"], match["part"])

    def fetch(self, **options: Any) -> Path:
        """Download files; the options are those of ``snapshot_download``."""
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self._repo, revision=self._revision, **options))

    def sizes(self) -> Sizes:
        """Return the sizes of all files.

        Raises:
            ConnectionError: the hub does not answer.
        """
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(self._repo, revision=self._revision, files_metadata=True)
        except Exception as error:  # of requests or httpx, depending on the version of huggingface_hub
            raise ConnectionError(str(error)) from error
        self._commit = info.sha
        return {file.rfilename: file.size for file in info.siblings or []}

    def part_of(self, name: str, begin: int, size: int) -> bytes:
        """Return bytes of a file.

        Raises:
            ConnectionError: the hub does not answer, or with another part.
        """
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self._repo, name, revision=self._commit)
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{begin + size - 1}"}
        content = bytearray()
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                answer.raise_for_status()
                skipped = 0 if answer.status_code == _PARTIAL else begin  # by servers without ranges
                for chunk in answer.iter_bytes():
                    content += chunk
                    if len(content) >= skipped + size:
                        break
        except Exception as error:  # of httpx
            raise ConnectionError(str(error)) from error
        if len(content) < skipped + size:
            raise ConnectionError(f"{name} ended after {len(content)} bytes")
        return bytes(content[skipped : skipped + size])

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of the library and of the network into ``ModelNotFoundError``."""
        from huggingface_hub.errors import HFValidationError

        try:
            yield
        except (OSError, HFValidationError) as error:  # all of huggingface_hub's network errors are OSErrors
            reason = str(error).strip().splitlines()[0]
            raise ModelNotFoundError(
                f"there is no file or folder '{self._hub_id}', and the Hugging Face hub cannot provide it: "
                f"{reason}"
            ) from error


def _fetched(
    hub_id: str,
    part: str | None,
    list_sizes: Callable[[], Sizes],
    fetch: Callable[..., Path],
    memory: int | None,
) -> Path:
    try:
        sizes = list_sizes()
    except OSError as unreachable:
        try:
            folder = fetch(local_files_only=True, allow_patterns=[])  # accepts a part of a repository
        except OSError:
            raise unreachable from None
        paths = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        return folder / choose(sizes, part, hub_id, memory)[0]
    place, wanted = choose(sizes, part, hub_id, memory)
    return fetch(allow_patterns=wanted) / place


def choose(sizes: Sizes, part: str | None, hub_id: str, memory: int | None = None) -> tuple[str, list[str]]:
    """Choose the model of a repository.

    Several GGUF files of one model differ in their types of weights: ``_BEST`` orders these, and the first
    whose bytes fit into the memory is chosen.

    Args:
        sizes: the files of the repository, with their sizes in bytes, None where the hub does not tell.
        part: see ``download``.
        hub_id: for messages.
        memory: see ``download``.

    Returns:
        The subfolder or file of the model, "." for the whole repository; and the files to download. Side
        files of the repository and of the model's folder are included.

    Raises:
        ModelNotFoundError: nothing matches ``part``, several files do, or none fits into the memory.
    """
    names = list(sizes)
    if part is None:
        return _default(sizes, ".", hub_id, memory)
    part = part.strip("/")
    if any(name.startswith(f"{part}/") for name in names):
        return _default(sizes, part, hub_id, memory)
    if part in names:
        return part, _with_companions(names, part)
    matching = [name for name in _models(names) if part.lower() in _tags(name)]
    return _one(matching, names, hub_id, f"nothing that matches ':{part}'")


def _default(sizes: Sizes, folder: str, hub_id: str, memory: int | None) -> tuple[str, list[str]]:
    names = list(sizes)
    inside = [name for name in names if _folder(name) == folder]
    side = [name for name in names if _folder(name) in {folder, "."} and _matches(name, *_SIDE)]
    weights = [name for name in inside if _matches(name, "model*.safetensors", "adapter_model.safetensors")]
    if weights:
        return folder, [*side, *weights]
    if any(PurePosixPath(name).name == GENAI_FILE for name in inside):
        return folder, sorted({*side, *inside})
    onnx = "onnx" if folder == "." else f"{folder}/onnx"
    graphs = [name for name in _models(names) if _folder(name) in (folder, onnx)]
    plain = [name for name in graphs if PurePosixPath(name).name == "model.onnx"]
    if not graphs:
        return folder, [*side, *inside]  # the caller reports what is missing
    return _one(plain[:1] or _best_gguf(graphs, sizes, hub_id, memory), names, hub_id, "no model")


def _best_gguf(models: list[str], sizes: Sizes, hub_id: str, memory: int | None) -> list[str]:
    """Return the GGUF file, or its shards, that suits this machine; all of ``models`` if they are no choice.

    Raises:
        ModelNotFoundError: no file fits into the memory.
    """
    forms: dict[str, list[str]] = {}
    stems = set()
    for name in models:
        stem = shard_stem(PurePosixPath(name).name) or PurePosixPath(name).stem
        match = _GGUF_TYPE.fullmatch(stem)
        if match is None or not name.endswith(".gguf"):
            return models
        stems.add((_folder(name), match["stem"].lower()))
        forms.setdefault(match["type"].upper(), []).append(name)
    if len(stems) != 1 or len(forms) < 2:
        return models
    totals = {form: sum(sizes[name] or 0 for name in files) for form, files in forms.items()}
    known = sorted((form for form in forms if form in _BEST), key=_BEST.index)
    for form in known:
        if memory is None or fits(totals[form], memory):
            return forms[form]
    if not known:
        return models
    least = min(known, key=lambda form: totals[form])
    repo = hub_id.partition(":")[0]
    raise ModelNotFoundError(
        f"no file of {repo} fits into this machine's memory: the smallest, {least}, has "
        f"{human_bytes(totals[least])} and runs in about {human_bytes(totals[least] * _ROOM)}, and it has "
        f"{human_bytes(memory or 0)}; name one anyway as {repo}:{least}"
    )


def _one(files: Sequence[str], names: Sequence[str], hub_id: str, missing: str) -> tuple[str, list[str]]:
    first: dict[str, str] = {}
    for name in sorted(files):  # the first of several shards
        first.setdefault(shard_stem(PurePosixPath(name).name) or name, name)
    if len(first) == 1:
        (name,) = first.values()
        return name, _with_companions(names, name)
    repo = hub_id.partition(":")[0]
    choices = ", ".join(sorted(first.values()) or sorted(_models(names)))
    held = f"{repo} holds several models" if files else f"{repo} holds {missing}"
    raise ModelNotFoundError(f"{held}; name one as {repo}:FILE" + (f": {choices}" if choices else ""))


def _with_companions(names: Sequence[str], name: str) -> list[str]:
    """Return a file with its external data, its other shards or its vision tower, and the side files."""
    stem, folder = shard_stem(PurePosixPath(name).name), _folder(name)
    companions = [
        other
        for other in names
        if other.startswith(name)
        or (stem is not None and _folder(other) == folder and shard_stem(PurePosixPath(other).name) == stem)
    ]
    if name in _models(names) and name.endswith(".gguf"):
        towers = [other for other in names if _is_tower(other) and _folder(other) == folder]
        companions += sorted(towers, key=_tower_rank)[:1]
    sides = {folder, ".", _folder(folder)}
    return [*companions, *(other for other in names if _folder(other) in sides and _matches(other, *_SIDE))]


def _models(names: Sequence[str]) -> list[str]:
    """Return the files of models."""
    return [name for name in names if _matches(name, "*.onnx", "*.gguf") and not _is_tower(name)]


def _is_tower(name: str) -> bool:
    return name.endswith(".gguf") and is_projector(PurePosixPath(name).name)


def _tower_rank(name: str) -> tuple[int, str]:
    """Return what orders the files of one vision tower."""
    stem = PurePosixPath(name).stem.upper()
    found = (place for place, kind in enumerate(_TOWERS) if stem.endswith((f"-{kind}", f".{kind}")))
    return next(found, len(_TOWERS)), name


def _tags(name: str) -> set[str]:
    """Return what ``part`` may be for a file: ``q4`` for model_q4.onnx, ``q4_k_m`` for x-Q4_K_M.gguf."""
    stem = PurePosixPath(name).stem.lower()
    stem = (shard_stem(PurePosixPath(name).name) or stem).lower()
    separators = "_-" if name.endswith(".onnx") else "-."
    return {stem[i + 1 :] for i, letter in enumerate(stem) if letter in separators}


def _folder(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _matches(name: str, *patterns: str) -> bool:
    return any(PurePosixPath(PurePosixPath(name).name).match(pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class DownloadedFiles:
    """The files of one model in huggingface_hub's cache.

    Args:
        repository: ``org/name``.
        name: the hub id that loads the model: ``org/name``, or ``org/name:part`` for a GGUF file.
        names: other hub ids that load it.
        paths: its files in the folder of a revision.
        size: bytes of the files.
        used: when one was last read, in seconds since 1970.
    """

    repository: str
    name: str
    names: tuple[str, ...]
    paths: tuple[Path, ...]
    size: int
    used: float

    def joined(self, other: DownloadedFiles) -> DownloadedFiles:
        """Return both models of a repository as one."""
        return DownloadedFiles(
            repository=self.repository,
            name=self.repository,
            names=(),
            paths=self.paths + other.paths,
            size=self.size + other.size,
            used=max(self.used, other.used),
        )


def downloaded_models() -> list[DownloadedFiles]:
    """Return the models in huggingface_hub's cache; none if that package is not installed.

    A GGUF file is a model of its own, with its shards, and with the vision tower if it is the only one; other
    files of a repository are one.
    """
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        model
        for repository in repositories
        if repository.repo_type == "model"
        for model in _models_of(repository)
    ]


def _models_of(repository: Any) -> Iterator[DownloadedFiles]:
    groups: dict[str, dict[Path, Any]] = {}
    for revision in repository.revisions:
        for file in revision.files:
            name = file.file_path.relative_to(revision.snapshot_path).as_posix()
            gguf = name.endswith(".gguf") and not _is_tower(name)
            stem = (shard_stem(PurePosixPath(name).name) or PurePosixPath(name).stem) if gguf else ""
            groups.setdefault(stem, {})[file.file_path] = file
    sides = groups.get("", {})
    if len(groups) > 1 and not any(_is_weight(path) for path in sides):
        groups.pop("", None)  # side files of GGUF models
    if len(groups) == 1:  # the tower of the only model goes with it, that of several stays with the others
        next(iter(groups.values())).update({path: sides[path] for path in sides if _is_tower(path.name)})
    for stem, files in groups.items():
        match, own = _GGUF_TYPE.fullmatch(stem), [path.name for path in files if not _is_tower(path.name)]
        part = stem and f":{match['type'] if match else min(own)}"
        blobs = {file.blob_path: file for file in files.values()}
        yield DownloadedFiles(
            repository=repository.repo_id,
            name=f"{repository.repo_id}{part}",
            names=tuple(f"{repository.repo_id}:{name}" for name in own) if stem else (),
            paths=tuple(files),
            size=sum(file.size_on_disk for file in blobs.values()),
            used=max(file.blob_last_accessed for file in blobs.values()),
        )


def _is_weight(path: Path) -> bool:
    return _matches(path.name, "*.safetensors", "*.onnx")


def remove_downloaded(model: DownloadedFiles) -> None:
    """Delete the files of a model, and its repository's folder if no file is left in it.

    Raises:
        OSError: a file cannot be deleted.
    """
    blobs = {path.resolve() for path in model.paths}
    repository = next(parent for parent in model.paths[0].parents if parent.name.startswith("models--"))
    for path in model.paths:
        path.unlink(missing_ok=True)
    linked = {path.resolve() for path in (repository / "snapshots").rglob("*") if path.is_symlink()}
    for blob in blobs - linked:
        blob.unlink(missing_ok=True)
    if not any(path.is_file() for path in (repository / "snapshots").rglob("*")):
        shutil.rmtree(repository)
