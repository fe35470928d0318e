"""The package: a folder with a model, its tokenizer and the record carryall.json."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from ..errors import CheckpointError, OutputExistsError, PackageError
from ..graph_opt.graph.half_scales import narrowed_scales, widen_scales
from ..graph_opt.graph.onnx_files import read_onnx
from ..progress import Progress
from ..storage.hashes import content_key
from ..storage.manifest import MISSING, UNREADABLE, find_damage, make_manifest
from ..storage.paths import check_place
from ..storage.scratch import folder_beside
from ..storage.writing import publish, writing
from .config import (
    CONFIG_FILE,
    GENERATION_FILE,
    LENGTH_KEYS,
    RawConfig,
    context_lengths,
    read_config,
    read_generation_config,
    read_json,
    states_length,
)
from .gguf.file import shard_paths
from .package_record import RECORD_FILE, PackageRecord, is_token, read_record
from .save import save_model
from .signature import DecoderSignature

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
TOKENIZER_FILE = "tokenizer.json"
COPIED_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_NEEDED = (MODEL_FILE, CONFIG_FILE, TOKENIZER_FILE)


class Package:
    """A package on disk; created by ``Package.open``."""

    def __init__(self, path: Path, record: PackageRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def open(cls, path: Path) -> Package:
        """Open a package and check the size and sha256 of each file; hashes of unchanged files are cached.

        Raises:
            PackageError: a file is missing or damaged, or the format version is not supported.
        """
        package = cls.unchecked(path)
        package.check()
        return package

    @classmethod
    def unchecked(cls, path: Path) -> Package:
        """Open a package without checking its files: for ``integrity``, which reports the damage.

        Raises:
            PackageError: the record is missing or damaged, or the format version is not supported.
        """
        if not (path / RECORD_FILE).is_file():
            raise PackageError(
                f"{path} is not a complete package: {RECORD_FILE} is missing; export the model again"
            )
        record = read_record(path / RECORD_FILE)
        for name in _NEEDED if record.is_complete else (MODEL_FILE,):
            if name not in record.files:
                raise PackageError(
                    f"{path / RECORD_FILE} is damaged: it does not list {name}; export the model again"
                )
        return cls(path, record)

    def check(self) -> None:
        """Compare the files with the record, and the weight files with the offsets in the graph.

        Raises:
            PackageError: a file is missing or damaged.
        """
        for name, wrong in self._damage():
            raise _damaged(self.path, name, wrong)
        self._check_data()

    @staticmethod
    def is_package(path: Path) -> bool:
        """Return whether ``path`` holds a carryall.json, damaged or not."""
        return os.path.lexists(path / RECORD_FILE)  # a record that is not a file: a damaged package

    @property
    def model_path(self) -> Path:
        """The path of the ONNX file."""
        return self.path / MODEL_FILE

    @cached_property
    def content_hash(self) -> str:
        """A hash of the content of all files of the package.

        Raises:
            CheckpointError: a file cannot be read.
        """
        known = self.record.sha256()
        return known if self.record.is_complete else f"{known} {fingerprint(self.path)}"

    @cached_property
    def signature(self) -> DecoderSignature:
        """The sizes that the graph's inputs and outputs state."""
        return DecoderSignature.of(self.graph)

    @cached_property
    def graph(self) -> ir.Model:
        """The graph, loaded once and shared; callers must not change it."""
        return self.load()

    def load(self) -> ir.Model:
        """Load a new copy of the graph, which the caller may change; weights are mapped from disk on demand.

        Raises:
            PackageError: the file is not ONNX, or stores weights in files that the record does not list.
        """
        try:
            model = read_onnx(self.model_path)
        except Exception as error:  # protobuf and onnx_ir raise errors of many types for a damaged file
            raise PackageError(f"{self.model_path} is damaged: {error}") from error
        for tensor in external_tensors(model):
            if str(tensor.location) not in self.record.files:
                raise PackageError(
                    f"{self.model_path} stores weight '{tensor.name}' in {tensor.location}, which is not "
                    f"listed in {RECORD_FILE}; export the model again"
                )
        widen_scales(model)
        return model

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of one of the checkpoint's JSON files, or {} if the file does not exist."""
        path = self.path / name
        return read_json(path) if path.is_file() else {}

    def integrity(self) -> dict[str, str]:
        """Hash every file again and return, by file name, what is wrong; "" for an intact file."""
        found = dict(self._damage(reread=True))
        return {name: found.get(name, "") for name in sorted({*self.record.files, *found})}

    def _damage(self, *, reread: bool = False) -> Iterator[tuple[str, str]]:
        yield from find_damage(self.path, self.record.files, reread=reread)
        for name in COPIED_FILES:
            if name in self.record.files:
                continue
            exists = (self.path / name).exists()
            if exists and self.record.is_complete:
                yield name, "was added after the export"
            elif not exists and name in _NEEDED:
                yield name, MISSING

    def _check_data(self) -> None:
        for tensor in external_tensors(self.graph):
            size, end = self.record.files[str(tensor.location)].size, (tensor.offset or 0) + tensor.nbytes
            if size < end:
                raise PackageError(
                    f"{self.path / tensor.location} is truncated: {size} bytes, {MODEL_FILE} needs {end}; "
                    "export the model again"
                )


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield the initializers that are stored as external data."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value


def _damaged(path: Path, name: str, wrong: str) -> PackageError:
    if wrong == MISSING:
        return PackageError(f"{path} is not a complete package: {name} {wrong}; export the model again")
    if wrong.startswith(UNREADABLE):
        return PackageError(f"{path / name} {wrong}")
    return PackageError(
        f"{path / name} is damaged: it {wrong}; export the model again "
        f"('carryall verify {path} --integrity' checks every file)"
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
    content: str | None = None,
    context_length: int | None = None,
    others: Sequence[str] = (),
) -> Package:
    """Write ``model`` and the tokenizer and configuration files of ``source`` into the folder ``out``.

    ``source`` is a checkpoint folder or another package; ``config`` is the content of its config.json, if
    already read; ``content`` is the fingerprint to record, by default that of ``source``; ``context_length``
    is recorded if config.json states none; ``others`` are relative paths of further files to copy. The other
    arguments are those of ``export_package``.

    Raises:
        OutputExistsError: ``out`` is not empty.
        CheckpointError: the checkpoint has no tokenizer.
        OSError: a file cannot be written; the incomplete package is deleted.
    """
    config = check_paths(source, out, config)
    with new_folder(out) as folder:
        with narrowed_scales(model):
            save_model(model, folder / MODEL_FILE, progress)
        for name in (*COPIED_FILES, *others):
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                with writing(folder / name):
                    shutil.copyfile(source / name, folder / name)
        if not (folder / CONFIG_FILE).is_file():  # onnxruntime-genai has other files
            _write_json(folder / CONFIG_FILE, config)
            _write_json(folder / GENERATION_FILE, read_generation_config(source))
        tokens = _read_bos_eos(source, config)
        if context_length is not None and not states_length(config):
            config = {**config, LENGTH_KEYS[0]: context_length}
        record = _make_record(folder, config, tokens, content or fingerprint(source), quantization, passes)
        record.write(folder)
    return Package(out, record)


def _write_json(path: Path, content: RawConfig) -> None:
    with writing(path):
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def check_paths(source: Path, out: Path, config: RawConfig | None = None) -> RawConfig:
    """Check the arguments of ``write_package`` before any work is done.

    Args:
        source: the checkpoint folder or package to copy from.
        out: the folder of the package to write.
        config: the content of the source's config.json, if already read.

    Returns:
        The content of the source's config.json.

    Raises:
        OutputExistsError: ``out`` is not empty.
        ModelNotFoundError: ``source`` is not a checkpoint.
        CheckpointError: ``source`` has no tokenizer, or its configuration is invalid.
        OSError: ``out`` cannot be created.
    """
    check_place(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise _not_empty(out)
    config = read_config(source) if config is None else config
    _read_bos_eos(source, config)
    if not (source / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{source} holds no {TOKENIZER_FILE}. Convert a tokenizer of another form with transformers: "
            "AutoTokenizer.from_pretrained(SRC).save_pretrained(SRC)"
        )
    return config


def check_tokenizer(source: Path) -> None:
    """Check that the tokenizer can be opened.

    Raises:
        CheckpointError: tokenizer.json is damaged, or needs a newer tokenizers library.
    """
    path = source / TOKENIZER_FILE
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"the installed tokenizers {version('tokenizers')} cannot read {path}: {error}"
        ) from error


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Create a temporary folder beside ``out``; rename it to ``out`` at the end, delete it on any failure.

    Without a failure, the folder survives a power cut.

    Raises:
        OutputExistsError: another process has filled ``out`` meanwhile.
        OSError: a file cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(out, out) as folder:
        yield folder
        _publish(folder, out)


def _publish(folder: Path, out: Path) -> None:
    try:
        if out.exists():
            out.rmdir()
        publish(folder, out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _not_empty(out) from error
        raise


def _not_empty(out: Path) -> OutputExistsError:
    return OutputExistsError(f"{out} is not empty; choose another folder or delete it")


def fingerprint(source: Path) -> str:
    """Return a hash of all files of a checkpoint, a folder or a GGUF file, that an export reads.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if source.is_file():
        folder, names = source.parent, [path.name for path in shard_paths(source)]
    else:
        folder = source
        patterns = ("*.safetensors", "*.safetensors.index.json", "*.onnx", "*.onnx.data")
        names = [path.name for pattern in patterns for path in folder.glob(pattern)]
        names += [name for name in COPIED_FILES if (folder / name).is_file()]
    try:
        return content_key(folder, names)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def _make_record(
    folder: Path,
    config: RawConfig,
    tokens: tuple[int | None, tuple[int, ...]],
    source: str,
    quantization: dict[str, Any] | None,
    passes: Sequence[str],
) -> PackageRecord:
    longest, default = context_lengths(config)
    return PackageRecord(
        model_type=config["model_type"],
        context_length=longest,
        default_context_length=default,
        bos_token_id=tokens[0],
        eos_token_ids=tokens[1],
        quantization=quantization,
        passes=tuple(passes),
        source=source,
        versions={name: version(name) for name in ("carryall", "onnx-ir")},
        files=make_manifest(
            folder,
            sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
        ),
    )


def _read_bos_eos(folder: Path, config: RawConfig) -> tuple[int | None, tuple[int, ...]]:
    """Return the BOS token and the EOS tokens of generation_config.json, else of config.json."""
    tokens = {**config, **read_generation_config(folder)}
    bos, eos = tokens.get("bos_token_id"), tokens.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for name, token in (("bos_token_id", bos), *(("eos_token_id", end) for end in ends)):
        if not is_token(token) and not (name == "bos_token_id" and token is None):
            raise CheckpointError(
                f"{folder}: '{name}' in config.json or generation_config.json must be a token id, "
                f"found {token!r}"
            )
    return bos, tuple(ends)
