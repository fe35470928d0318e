"""Resolve MODEL to a runnable decoder: a package, an ONNX file, or what runs in place."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError, GraphError, PackageError, UnsupportedModelError, UsageError
from ...exporter.audio_processor import hears
from ...exporter.encoders.names import is_encoder
from ...exporter.facts import GraphFacts
from ...exporter.gguf.file import GGUF_SUFFIX, GgufFile, shard_paths
from ...exporter.gguf.seeing import gguf_file, tower_of, towers_beside
from ...exporter.image_processor import has_processor, has_tower
from ...exporter.package import (
    AUDIO_FILE,
    COPIED_FILES,
    TEXT_ENCODER_FILE,
    VISION_FILE,
    Package,
    external_tensors,
    fingerprint,
)
from ...exporter.rope_scaling import scaled_config
from ...exporter.safetensors_files import weight_files
from ...progress import Progress
from ...records import dataclass
from ...storage.cache import cache_key, cached_folder
from ...storage.file_identity import Identity, identity_of
from ...storage.hashes import content_key
from ...storage.known_contents import known_key, learn_content
from ...storage.remembered import recalled, remembered
from ...storage.stored_tensor import StoredTensor
from ..process.garbage import collector_paused
from .context import ContextLengths, optional_config, stated_lengths
from .exported import exported_package, quantized_package, recipe_facts, recipe_of, scaled_content
from .find import find_model, side_folder

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What a list of models tells of one.

    Args:
        family: the ``model_type``; empty if no file states it.
        parameters: the number of parameters; 0 if a kernel packed them.
        quantization: the method, or the type of the largest weight.
        bytes: the size of graph and weights.
        digest: a hash of their content.
        modified: when the graph was written, in seconds of Unix time.
    """

    family: str
    parameters: int
    quantization: str
    bytes: int
    digest: str
    modified: float


@dataclass(frozen=True)
class SourceModel:
    """A runnable decoder on disk. Each file is read once, when it is first needed.

    Args:
        name: the user's name of the model.
        folder: the folder of tokenizer and configuration.
        model_path: the ONNX file.
        package: the package, if the model is one.
    """

    name: str
    folder: Path
    model_path: Path
    package: Package | None = field(default=None, compare=False, repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json, or the same facts of genai_config.json; empty if there is neither.

        Raises:
            CheckpointError: the file is damaged.
        """
        return optional_config(self.folder)

    @cached_property
    def context(self) -> ContextLengths | None:
        """The maximum number of tokens of a sequence; None if no file of the model states it.

        Raises:
            CheckpointError: config.json is damaged.
            GraphError: the file is not a valid ONNX graph.
        """
        if self.package is None:
            return stated_lengths(self.config, self.facts)
        record = self.package.record
        return ContextLengths(record.context_length, record.default_context_length)

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures."""
        return self.package is not None and self.package.sees

    @property
    def hears(self) -> bool:
        """Whether the model takes sound."""
        return self.package is not None and self.package.hears

    def sight_folder(self) -> Path:
        """Return the folder with ``vision.onnx`` or ``audio.onnx``, and the record of its processor."""
        return self.folder

    def encoders(self) -> list[ir.Model]:
        """Return the graphs of what it sees or hears with, with lazy weights; none if it reads text only.

        Raises:
            CarryallError: see ``sight_folder``; or a file is not a valid ONNX graph.
        """
        from ...graph_opt.graph.load import load_model

        if not (self.sees or self.hears):
            return []
        paths = [self.folder / name for name in (VISION_FILE, TEXT_ENCODER_FILE, AUDIO_FILE)]
        return [load_model(path) for path in paths if path.is_file()]

    @cached_property
    def graph(self) -> ir.Model:
        """The graph with lazy weights. It is shared and must not be changed; see ``load``.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        from ...graph_opt.graph.load import check_loaded, read_model

        model = read_model(self.model_path) if self.package is None else self.package.graph
        check_loaded(model, self.model_path)
        return model

    @property
    def _small_graph(self) -> ir.Model:
        """A graph with the facts of ``graph``, perhaps of fewer nodes."""
        return self.graph

    @property
    def quantization(self) -> str | None:
        """The method that quantized it, None for none or if no file states it."""
        record = None if self.package is None else self.package.record.quantization
        return None if record is None else record.get("method")

    @cached_property
    def facts(self) -> GraphFacts:
        """Facts of the graph, from the cache if it was read before.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        return GraphFacts.from_json(self._remembered(lambda: GraphFacts.of(self._small_graph).to_json()))

    @cached_property
    def summary(self) -> ModelSummary:
        """What a list of models tells of it.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        known = self._remembered(self._weights_in_short, form="in short")
        record = self.package.record if self.package is not None else None
        folder = self.model_path.parent
        return ModelSummary(
            family=str(self.config.get("model_type") or (record.model_type if record else "")),
            parameters=known["parameters"],
            quantization=str(self.quantization or known["type"]),
            bytes=sum((folder / name).stat().st_size for name in self.graph_files),
            digest=self.content_key,
            modified=self.model_path.stat().st_mtime,
        )

    def _weights_in_short(self) -> dict[str, Any]:
        from ...graph_opt.graph.graph_facts import initializers, parameter_count

        graph = self._small_graph
        largest = max(initializers(graph), key=lambda tensor: tensor.size, default=None)
        kind = "" if largest is None else largest.dtype.name
        return {
            "parameters": parameter_count(graph) or 0,
            "type": {"FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16"}.get(kind, kind),
        }

    @property
    def lowered(self) -> bool:
        """Whether the graph was already lowered for a provider."""
        return self.facts.lowered

    def _remembered(self, read: Callable[[], dict[str, Any]], **of: str) -> dict[str, Any]:
        """Return what was read of the graph; equal files have equal facts."""

        def compute() -> dict[str, Any]:
            with self.unchanged():
                return read()

        return remembered(cache_key(facts_of=self.content_key, **of), compute)

    def load(self, *, stored: bool = False) -> ir.Model:
        """Load another copy of the graph, which passes may change.

        Args:
            stored: weights may be as the files hold them: experts in stacks, ``contract.EXPERT_STACKS``, and
                weights of products as floats that know their blocks.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        from ...graph_opt.graph.load import load_model

        return load_model(self.model_path)

    @cached_property
    def graph_files(self) -> tuple[str, ...]:
        """The names of the files of graph and weights, in the folder of ``model_path``.

        Raises:
            GraphError: the file is not a valid ONNX graph.
        """
        if self.package is not None:
            return tuple(name for name in self.package.record.files if name not in COPIED_FILES)
        name, folder = self.model_path.name, self.model_path.parent
        known = remembered(cache_key(weight_files_of=self._hash([name])), self._weight_files)["files"]
        if not all((folder / file).is_file() for file in known):
            known = self._weight_files()["files"]  # says what is wrong with them
        return name, *known

    def _weight_files(self) -> dict[str, Any]:
        return {"files": sorted({str(tensor.location) for tensor in external_tensors(self.graph)})}

    @property
    def canonical(self) -> bool:
        """Whether the exporter builds the graph now, in the form of lowerings; a file may be anything."""
        return False

    def portable_file(self) -> Path:
        """Return an ONNX file of the portable graph."""
        return self.model_path

    @property
    def unprepared_bytes(self) -> int:
        """The bytes of weights that a preparation reads in place and writes for the target, 0 for others."""
        return 0

    @cached_property
    def content_key(self) -> str:
        """A hash of the content of the graph and its weights.

        Raises:
            GraphError: a file cannot be read, or the graph is not valid.
        """
        return self._hash(self.graph_files)

    def _hash(self, names: Iterable[str]) -> str:
        try:
            return content_key(self.model_path.parent, names)
        except OSError as error:
            raise GraphError(f"{error.filename} cannot be read: {error.strerror}") from error

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check at the end of a block that no file of graph or weights was changed during it.

        Raises:
            PackageError: a file was changed.
        """
        before = self.content_key
        yield
        if self._hash(self.graph_files) != before:
            raise PackageError(f"{self.model_path} or its weights changed while they were read; try again")


@dataclass(frozen=True)
class InPlaceModel(SourceModel):
    """A model that runs without a package.

    Its graph is built from headers, and its weights are read when it is lowered.

    ``model_path`` is the first file. Only providers that lower nothing need a package of it.

    Args:
        rope_scaling: in place of that of its configuration, see ``ModelConfig``; None leaves it.
    """

    rope_scaling: str | None = field(kw_only=True, default=None)

    @cached_property
    def config(self) -> dict[str, Any]:
        """See ``SourceModel``; with ``rope_scaling``.

        Raises:
            CheckpointError: the file is damaged.
            UnsupportedModelError: the model has no rope, or one that the scaling cannot replace.
            UsageError: the context would be too long.
        """
        raw, scaling = optional_config(self.folder), self.rope_scaling
        if scaling is None:
            return raw
        # Families import the library of graphs, which the start of a prepared model does without.
        return remembered(cache_key(rope_scaling=scaling, config=raw), lambda: scaled_config(raw, scaling))

    @cached_property
    def context(self) -> ContextLengths | None:
        """See ``SourceModel``; who scales a rope wants the longer context, which is then the default."""
        lengths = stated_lengths(self.config, self.facts)
        if lengths is None or self.rope_scaling is None:
            return lengths
        return ContextLengths(lengths.longest, lengths.longest)

    @abc.abstractmethod
    def build(self, *, stored: bool = False) -> ir.Model:
        """Build the graph.

        Args:
            stored: as for ``load``.

        Raises:
            CheckpointError: a file is damaged.
            UnsupportedModelError: carryall cannot read its architecture or a type of its weights.
        """

    @abc.abstractmethod
    def export(self) -> Package:
        """Return the package of the model, which is written into the cache once."""

    @abc.abstractmethod
    def identity(self) -> str:
        """Return a hash that tells these files from any others."""

    @cached_property
    def sees(self) -> bool:
        return has_tower(self.config) and (bool(self.config.get("encoder")) or has_processor(self.folder))

    @property
    def hears(self) -> bool:
        return hears(self.config)

    def sight_folder(self) -> Path:
        """See ``SourceModel``; it is written into the cache once.

        Raises:
            CheckpointError: its picture processor or a weight is damaged.
            UnsupportedModelError: its picture processor, or an option of it, is not supported.
        """
        from ...exporter.export import sight

        def build(folder: Path) -> None:
            write = sight(self.folder, self.config, self._tensors)
            if write is not None:
                write(folder)

        key = cache_key(vision=self._sight_content)
        return cached_folder("vision", key, build, {"model": self.name})

    def encoders(self) -> list[ir.Model]:
        from ...exporter.export import encoder_models

        if not (self.sees or self.hears):
            return []
        found = encoder_models(self.folder, self.config, self._tensors)
        return [] if found is None else list(found[1].values())

    @property
    def _tensors(self) -> Mapping[str, StoredTensor] | None:
        """The tensors by name; None for those of the folder."""
        return None

    @property
    def _sight_content(self) -> str:
        """A hash of the content of what it sees or hears with."""
        return self.content_key

    @cached_property
    def graph(self) -> ir.Model:
        """The graph, see ``build``. It is shared and must not be changed."""
        return self.build()

    @cached_property
    def _small_graph(self) -> ir.Model:
        """The graph with weights as the files hold them, shared as ``graph``; the same where none are."""
        return self.build(stored=True) if self.has_stored else self.graph

    @property
    def has_stored(self) -> bool:
        """Whether its files hold weights that a graph may take as they are."""
        return False

    def load(self, *, stored: bool = False) -> ir.Model:
        """Return the graph for passes that change it; a later call will build another one."""
        graph = self._small_graph if stored else self.graph
        for name in ("graph", "_small_graph"):
            if self.__dict__.get(name) is graph:
                del self.__dict__[name]
        return graph

    @property
    def canonical(self) -> bool:
        return True

    def portable_file(self) -> Path:
        """Export the model into the cache, and return the graph."""
        return self.export().model_path

    @cached_property
    def content_key(self) -> str:
        return self.identity()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check at the end of a block that no file was changed during it.

        Raises:
            CheckpointError: a file was changed.
        """
        yield
        if self.identity() != self.content_key:
            raise CheckpointError(f"{self.model_path} was replaced or changed while it was read; try again")


@dataclass(frozen=True)
class GgufModel(InPlaceModel):
    """A GGUF file that runs in place.

    Args:
        tower: the file of its vision tower; None for a model of text.
        opened: returns the file, whose header is read once.
        known: the identities of the file and of its tower's when they were resolved.
        key: of their content, see ``known_key``.
    """

    tower: Path | None = field(kw_only=True)
    opened: Callable[[], GgufFile] = field(kw_only=True, compare=False, repr=False)
    known: tuple[Identity, ...] = field(kw_only=True, compare=False, repr=False)
    key: str = field(kw_only=True, compare=False, repr=False)

    def build(self, *, stored: bool = False) -> ir.Model:
        from ...exporter.export import export_model

        file, kept = self.opened(), self._kept if stored else ()
        return export_model(self.model_path, self.config, file.tensors, file.stacks, kept)

    @property
    def has_stored(self) -> bool:
        return bool(self._kept)

    @property
    def _kept(self) -> set[str]:
        """The types of its weights that the kernels read as they are stored."""
        from ...graph_opt.lower.products.stored_tiles import FORMS

        return self.opened().types & FORMS.keys()

    def export(self) -> Package:
        return exported_package(self.model_path, rope_scaling=self.rope_scaling)

    @property
    def _tensors(self) -> Mapping[str, StoredTensor]:
        return self.opened().tensors

    @property
    def quantization(self) -> str | None:
        """The type of most of its weights."""
        return self.opened().main_type

    @property
    def unprepared_bytes(self) -> int:
        """The bytes of the files: tiles have the size of the blocks in the file."""
        return sum(path.stat().st_size for path in shard_paths(self.model_path))

    @cached_property
    def content_key(self) -> str:
        return scaled_content(self.key, self.rope_scaling)

    def identity(self) -> str:
        """Return the key of the content if the files are those that were resolved, else their own."""
        now = (identity_of(shard_paths(self.model_path)), *_identities(self.tower))
        return self.content_key if now == self.known else "+".join(each.own for each in now)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """See ``InPlaceModel``; and where the block has read the weights, copies are known by them later."""
        with super().unchanged():
            yield
            content = self.opened().content()
        if content is not None:
            learn_content(self.known[0], content)


@dataclass(frozen=True)
class CheckpointModel(InPlaceModel):
    """A checkpoint folder that runs in place, quantized on the way if that needs no text.

    Args:
        method: how its weights are quantized; None for floats.
        progress: called while the method measures the model.
    """

    method: str | None = field(kw_only=True, default=None)
    progress: Progress | None = field(kw_only=True, default=None, compare=False, repr=False)

    def build(self, *, stored: bool = False) -> ir.Model:
        from .building import checkpoint_graph

        recipe = recipe_of(self.method)
        return checkpoint_graph(self.folder, self.config, recipe, fingerprint(self.folder), self.progress)

    @property
    def _sight_content(self) -> str:
        return fingerprint(self.folder)  # not of how the decoder is quantized

    def export(self) -> Package:
        return exported_package(self.folder, self.method, self.progress, self.rope_scaling)

    @property
    def unprepared_bytes(self) -> int:
        """The bytes of the weights in the smallest form that a target computes with."""
        return int(self._remembered(self._weight_bytes, form="bytes of weights")["bytes"])

    def _weight_bytes(self) -> dict[str, Any]:
        from ...graph_opt.graph.graph_facts import initializers
        from ...graph_opt.graph.lazy import halves_of

        sizes = ((tensor, tensor.nbytes) for tensor in initializers(self.graph))
        return {"bytes": sum(size if halves_of(tensor) is None else size // 2 for tensor, size in sizes)}

    @cached_property
    def graph_files(self) -> tuple[str, ...]:
        """The names of the files of weights."""
        return tuple(sorted(path.name for path in self.folder.glob("*.safetensors")))

    @property
    def quantization(self) -> str | None:
        if self.method is not None:
            return self.method
        stored = self.config.get("quantization_config")
        return str(stored["quant_method"]) if isinstance(stored, dict) and "quant_method" in stored else None

    def identity(self) -> str:
        """Return a hash of the content of the files and of the recipe."""
        record = recipe_facts(self.method)["record"]
        content = scaled_content(fingerprint(self.folder), self.rope_scaling)
        return cache_key(content=content, quantization=record)


def gguf_in_place(name: str, path: Path, rope_scaling: str | None = None) -> GgufModel:
    """Return a GGUF file with configuration and tokenizer in the cache, where they are written once.

    Raises:
        CheckpointError: a file is damaged, or the vision tower beside it is of another model.
        UnsupportedModelError: carryall cannot read what it holds.
    """
    paths = shard_paths(path)
    first, identity = paths[0], identity_of(paths)
    tower = _tower(first, identity)

    @functools.cache
    def opened() -> GgufFile:
        file = gguf_file(first, tower)
        file.watch()
        return file

    def build(folder: Path) -> None:
        from ...exporter.export import write_gguf_sides

        with collector_paused():
            write_gguf_sides(opened(), folder, to_open=True)

    key, known = known_key(identity, paths), (identity, *_identities(tower))
    if tower is not None:
        key = cache_key(decoder=key, tower=known_key(known[1], [tower]))
    folder = cached_folder("gguf", cache_key(gguf=key), build, {"model": name})
    return GgufModel(
        name,
        folder,
        first,
        tower=tower,
        opened=opened,
        known=known,
        key=key,
        rope_scaling=rope_scaling,
    )


def _identities(tower: Path | None) -> list[Identity]:
    return [] if tower is None else [identity_of([tower])]


def _tower(first: Path, identity: Identity) -> Path | None:
    """Return ``tower_of`` a decoder, which is kept: to find it reads all tokens of the decoder."""
    beside = {file.name: identity_of([file]).own for file in towers_beside(first)}
    if not beside:
        return None
    key = cache_key(tower_of=identity.own, beside=beside)
    known = recalled(key)
    if known is None:
        if (found := tower_of(first)) is None:
            return None
        known = remembered(key, lambda: {"name": found.name})
    return first.with_name(known["name"])


def resolve_model(
    model: str | Path,
    *,
    quantize: str | None = None,
    rope_scaling: str | None = None,
    progress: Progress | None = None,
) -> SourceModel:
    """Find a model; export and quantize it into the cache if needed.

    Args:
        model: any form of MODEL, see ``docs/models.md``.
        quantize: the quantization method, such as ``int4``; None does not quantize.
        rope_scaling: as for ``ModelConfig``.
        progress: called for every tensor written.

    Raises:
        ModelNotFoundError: there is no model of that name.
        UsageError: the model cannot be quantized or scaled, or its format is not supported.
        UnsupportedModelError: no exporter supports the model.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
        GraphError: the package's graph is not valid.
    """
    path = find_model(model)
    if rope_scaling is not None:
        _check_scalable(path, rope_scaling)
    if path.suffix == ".onnx" and path.is_file():
        if quantize is not None:
            raise UsageError(f"{path} is an ONNX file; quantize it first: carryall quantize {path} OUT")
        return _onnx_file(str(model), path)
    if path.suffix.lower() == GGUF_SUFFIX and path.is_file() and quantize is None:
        return gguf_in_place(str(model), path, rope_scaling)
    if not Package.is_package(path):
        needs_text = recipe_facts(quantize)["needs_text"]
        if path.is_dir():
            files = weight_files(path)
            found = CheckpointModel(
                str(model),
                path,
                files[0],
                method=quantize,
                progress=progress,
                rope_scaling=rope_scaling,
            )
            _refuse_encoder(path, str(found.config.get("model_type")))
            if not needs_text:
                return found
        return _package_files(str(model), exported_package(path, quantize, progress, rope_scaling))
    package = Package.open(path, read_graph=False)
    _refuse_encoder(path, package.record.model_type)
    if quantize is not None:
        package = quantized_package(package, quantize, progress)
    return _package_files(str(model), package)


def _check_scalable(path: Path, rope_scaling: str) -> None:
    """Refuse to scale the rope of a graph, which computes its angles already."""
    if (path.suffix == ".onnx" and path.is_file()) or Package.is_package(path):
        raise UsageError(
            f"{path} is an exported graph, whose rotary embedding is fixed; take the checkpoint or GGUF "
            f"file, or export that again: carryall export SRC DST --rope-scaling {rope_scaling}"
        )


def _refuse_encoder(folder: Path, model_type: str) -> None:
    """Refuse a checkpoint or package of a text encoder where a language model is needed."""
    if is_encoder({"model_type": model_type}):
        raise UnsupportedModelError(
            f"{folder} is a text encoder, which generates no text; use carryall.TextEncoder or carryall "
            "serve, and optimize or quantize its model.onnx"
        )


def locate_model(model: str | Path) -> Path:
    """Return the folder or ONNX file that MODEL names. A GGUF file is exported into the cache.

    Raises:
        CheckpointError: the GGUF file is damaged.
        UnsupportedModelError: carryall cannot read what the GGUF file holds.
        ModelNotFoundError: and the others of ``find_model``.
    """
    path = find_model(model)
    return exported_package(path).path if path.suffix.lower() == GGUF_SUFFIX else path


def _package_files(name: str, package: Package) -> SourceModel:
    return SourceModel(
        name=name,
        folder=package.path,
        model_path=package.model_path,
        package=package,
    )


def _onnx_file(name: str, path: Path) -> SourceModel:
    return SourceModel(name=name, folder=side_folder(path), model_path=path)
