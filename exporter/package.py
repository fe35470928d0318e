"""The package: a folder with a model, its tokenizer and a record of how it was made."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..errors import CheckpointError, OutputExistsError, PackageError
from ..progress import Progress
from .config import RawConfig, context_lengths, read_config, read_json
from .save import save_model
from .signature import DecoderSignature

FORMAT_VERSION = 1
MODEL_FILE, DATA_FILE, RECORD_FILE = "model.onnx", "model.onnx.data", "carryall.json"
TOKENIZER_FILE = "tokenizer.json"
COPIED_FILES = (
    "config.json",
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageRecord:
    """What carryall.json holds.

    Args:
        context_length: most tokens a sequence may have.
        default_context_length: the same where nobody asked for more; smaller for ropes with a long form.
        bos_token_id: None where the model has none.
        eos_token_ids: tokens that end a text.
        quantization: how the weights were quantized, None if they were not.
        passes: names of the passes applied, in order.
        source: ``fingerprint`` of the checkpoint.
        versions: of the libraries that made the package.
        files: sha256 of the model files.
    """

    format_version: int = FORMAT_VERSION
    model_type: str
    context_length: int
    default_context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None
    passes: tuple[str, ...]
    source: str
    versions: dict[str, str]
    files: dict[str, str]


class Package:
    """A package on disk. ``Package.open`` makes one."""

    def __init__(self, path: Path, record: PackageRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def open(cls, path: Path) -> Package:
        """Open and check a package.

        Raises:
            PackageError: a file is missing or too short, or another version of carryall is needed.
        """
        for name in (RECORD_FILE, MODEL_FILE, "config.json", TOKENIZER_FILE):
            if not (path / name).is_file():
                raise PackageError(f"{path} is no complete package: {name} is missing")
        package = cls(path, _read_record(path / RECORD_FILE))
        package._check_data()
        return package

    @staticmethod
    def is_package(path: Path) -> bool:
        """Whether ``path`` looks like a package at all."""
        return (path / RECORD_FILE).is_file()

    @property
    def model_path(self) -> Path:
        """The ONNX file."""
        return self.path / MODEL_FILE

    @cached_property
    def content_hash(self) -> str:
        """Changes whenever the model does."""
        return hashlib.sha256(json.dumps(self.record.files, sort_keys=True).encode()).hexdigest()

    @cached_property
    def signature(self) -> DecoderSignature:
        """The sizes that the graph states."""
        return DecoderSignature.of(self.graph)

    @cached_property
    def graph(self) -> ir.Model:
        """The graph as it lies on disk, read once: to look at, never to change."""
        return self.load()

    def load(self) -> ir.Model:
        """The graph, its weights mapped from disk on demand; a new one at each call, free to change."""
        try:
            return ir.load(self.model_path)
        except Exception as error:  # protobuf and onnx_ir raise many kinds for a damaged file
            raise PackageError(f"{self.model_path} is damaged: {error}") from error

    def json(self, name: str) -> dict[str, Any]:
        """The content of one of the checkpoint's JSON files, empty if it has none."""
        path = self.path / name
        return read_json(path) if path.is_file() else {}

    def verify_hashes(self) -> None:
        """Read all model files and compare them with the record.

        Raises:
            PackageError: a file differs.
        """
        for name, expected in self.record.files.items():
            if _sha256(self.path / name) != expected:
                raise PackageError(
                    f"{self.path / name} is damaged: its sha256 is not the one in {RECORD_FILE}"
                )

    def _check_data(self) -> None:
        needed: dict[Path, int] = {}
        for value in self.graph.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                path = self.path / tensor.location
                needed[path] = max(needed.get(path, 0), (tensor.offset or 0) + tensor.nbytes)
        for path, size in needed.items():
            if not path.is_file():
                raise PackageError(f"{self.path} is no complete package: {path.name} is missing")
            if path.stat().st_size < size:
                raise PackageError(
                    f"{path} is truncated: {path.stat().st_size} bytes, {MODEL_FILE} needs {size}"
                )


def write_package(
    model: ir.Model,
    source: Path,
    out: Path,
    *,
    quantization: dict[str, Any] | None = None,
    passes: Sequence[str] = (),
    progress: Progress | None = None,
    config: RawConfig | None = None,
) -> Package:
    """Write ``model`` and the other files of ``source`` into the folder ``out``.

    ``source`` is a checkpoint folder or another package, ``config`` its config.json where that was read
    already; the other arguments are those of ``export_package``.

    Raises:
        OutputExistsError: ``out`` holds something.
        CheckpointError: the checkpoint has no tokenizer.
        OSError: the disk is full, or the like; nothing is left behind.
    """
    config = check_paths(source, out, config)
    with new_folder(out) as folder:
        save_model(model, folder / MODEL_FILE, progress)
        for name in COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        record = _make_record(folder, config, fingerprint(source), quantization, passes)
        (folder / RECORD_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    return Package(out, record)


def check_paths(source: Path, out: Path, config: RawConfig | None = None) -> RawConfig:
    """Refuse what ``write_package`` would refuse, before any work.

    Args:
        source: of the files.
        out: where a package is to be written.
        config: config.json of the source, where it was read already.

    Returns:
        config.json of the source.

    Raises:
        OutputExistsError: ``out`` holds something.
        ModelNotFoundError: ``source`` is no checkpoint.
        CheckpointError: it has no tokenizer.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"{out} is not empty; choose another folder or delete it")
    config = read_config(source) if config is None else config
    if not (source / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{source} holds no {TOKENIZER_FILE}. Where it has another form of tokenizer, transformers "
            "converts it: AutoTokenizer.from_pretrained(SRC).save_pretrained(SRC)"
        )
    return config


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into, renamed to ``out`` at the end and deleted on any failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
        if out.exists():
            out.rmdir()
        folder.rename(out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(out)  # a failed write does not know its file
        raise


def fingerprint(folder: Path) -> str:
    """A hash of the names, sizes and times of a checkpoint's files, and of config.json."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(
        [*folder.glob("*.safetensors"), *folder.glob("*.onnx*"), *folder.glob(TOKENIZER_FILE)]
    ):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _make_record(
    folder: Path, config: RawConfig, source: str, quantization: dict[str, Any] | None, passes: Sequence[str]
) -> PackageRecord:
    generation = folder / "generation_config.json"
    tokens = {**config, **(read_json(generation) if generation.is_file() else {})}
    eos = tokens.get("eos_token_id")
    longest, default = context_lengths(config)
    return PackageRecord(
        model_type=config["model_type"],
        context_length=longest,
        default_context_length=default,
        bos_token_id=tokens.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        quantization=quantization,
        passes=tuple(passes),
        source=source,
        versions={name: version(name) for name in ("carryall", "onnx-ir")},
        files={name: _sha256(folder / name) for name in (MODEL_FILE, DATA_FILE)},
    )


def _read_record(path: Path) -> PackageRecord:
    try:
        content = read_json(path)
    except CheckpointError as error:
        raise PackageError(f"{path} is damaged: {error}") from error
    if content.get("format_version") != FORMAT_VERSION:
        raise PackageError(
            f"{path} has format version {content.get('format_version')!r}, this carryall reads "
            f"{FORMAT_VERSION}; export the model again"
        )
    missing = {field.name for field in fields(PackageRecord)} - content.keys()
    if missing:
        raise PackageError(f"{path} lacks {', '.join(sorted(missing))}; export the model again")
    for name, kind in (("eos_token_ids", list), ("passes", list), ("files", dict), ("context_length", int)):
        if not isinstance(content[name], kind):
            raise PackageError(f"{path} is damaged: '{name}' is {content[name]!r}")
    content["eos_token_ids"], content["passes"] = tuple(content["eos_token_ids"]), tuple(content["passes"])
    return PackageRecord(**{field.name: content[field.name] for field in fields(PackageRecord)})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
