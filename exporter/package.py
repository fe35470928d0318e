"""The package: a folder with a model, its tokenizer and the record carryall.json."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, PackageError
from ..storage.hashes import content_key
from ..storage.manifest import MISSING, UNREADABLE, find_damage
from .audio_processor import AUDIO_PROCESSOR_FILE
from .config import CONFIG_FILE, GENERATION_FILE, read_json
from .image_processor import IMAGE_PROCESSOR_FILE, SIDE_FILES
from .package_record import RECORD_FILE, PackageRecord, read_record
from .signature import DecoderSignature

if TYPE_CHECKING:
    import onnx_ir as ir

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
VISION_FILE = "vision.onnx"  # of a model that sees
# Of one whose encoder reads a text behind a picture. Weights that equal the decoder's are in DATA_FILE.
TEXT_ENCODER_FILE = "text_encoder.onnx"
AUDIO_FILE = "audio.onnx"  # of a model that hears
DRAFT_HEAD_FILE = "mtp.onnx"  # of a model with a head that predicts further tokens
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
# What a package of a model that sees or hears has beside the others and the text encoder.
SIGHT_FILES = (
    *(VISION_FILE, f"{VISION_FILE}.data", IMAGE_PROCESSOR_FILE),
    *(AUDIO_FILE, f"{AUDIO_FILE}.data", AUDIO_PROCESSOR_FILE),
    *SIDE_FILES,
)
HEAD_FILES = (DRAFT_HEAD_FILE, f"{DRAFT_HEAD_FILE}.data")
_NEEDED = (MODEL_FILE, CONFIG_FILE, TOKENIZER_FILE)


class Package:
    """A package on disk; created by ``Package.open``."""

    def __init__(self, path: Path, record: PackageRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def open(cls, path: Path, *, read_graph: bool = True) -> Package:
        """Open a package and check the size and sha256 of each file; hashes of unchanged files are cached.

        Args:
            path: the folder.
            read_graph: check the places of the weights too, see ``load``; False leaves that to ``graph``, for
                callers that may know from an earlier time what the graph holds.

        Raises:
            PackageError: a file is missing or damaged, or the format version is not supported.
        """
        package = cls.unchecked(path)
        package.check()
        if read_graph:
            _ = package.graph
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
        """Compare the files with the record.

        Raises:
            PackageError: a file is missing or damaged.
        """
        for name, wrong in self._damage():
            raise _damaged(self.path, name, wrong)

    @staticmethod
    def is_package(path: Path) -> bool:
        """Return whether ``path`` holds a carryall.json, damaged or not."""
        return os.path.lexists(path / RECORD_FILE)  # a record that is not a file: a damaged package

    @property
    def model_path(self) -> Path:
        """The path of the ONNX file."""
        return self.path / MODEL_FILE

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures."""
        return VISION_FILE in self.record.files and IMAGE_PROCESSOR_FILE in self.record.files

    @property
    def hears(self) -> bool:
        """Whether the model takes sound."""
        return AUDIO_FILE in self.record.files and AUDIO_PROCESSOR_FILE in self.record.files

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
            PackageError: the file is not ONNX, or stores weights in files that the record does not list, or
                beyond their ends.
        """
        from ..graph_opt.graph.half_scales import widen_scales
        from ..graph_opt.graph.onnx_files import read_onnx

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
            self._check_size(tensor)
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

    def _check_size(self, tensor: ir.ExternalTensor) -> None:
        size, end = self.record.files[str(tensor.location)].size, (tensor.offset or 0) + tensor.nbytes
        if size < end:
            raise PackageError(
                f"{self.path / tensor.location} is truncated: {size} bytes, {MODEL_FILE} needs {end}; "
                "export the model again"
            )


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield the initializers that are stored as external data."""
    import onnx_ir as ir

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


def fingerprint(source: Path) -> str:
    """Return a hash of all files of a checkpoint, a folder or a GGUF file, that an export reads.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if source.is_file():
        from .gguf.file import shard_paths  # only files of this kind need it
        from .gguf.seeing import tower_of

        tower = tower_of(source)
        folder, paths = source.parent, [*shard_paths(source), *([] if tower is None else [tower])]
        names = [path.name for path in paths]
    else:
        folder = source
        patterns = ("*.safetensors", "*.safetensors.index.json", "*.onnx", "*.onnx.data")
        names = [path.name for pattern in patterns for path in folder.glob(pattern)]
        names += [name for name in (*COPIED_FILES, *SIDE_FILES) if (folder / name).is_file()]
    try:
        return content_key(folder, names)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
