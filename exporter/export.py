"""Export a Hugging Face checkpoint to a portable graph, and write it as a package."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..contract import CONTEXT_LENGTH
from ..errors import UnsupportedModelError, UsageError
from ..graph_opt.graph.saving import save_model
from ..progress import Progress
from ..records import dataclass
from ..storage.scratch import scratch_folder
from ..storage.stored_tensor import StoredStack, StoredTensor
from ..storage.writing import writing
from .audio_processor import AudioProcessor, audio_module, audio_processor, hears
from .config import CONFIG_FILE, RawConfig, context_lengths, read_config
from .config_checks import check_layer_count
from .decoder import Decoder
from .draft_heads import draft_head_model
from .family import families as families
from .family import family as family
from .family import normalised_config
from .gguf.file import GGUF_SUFFIX, GgufFile
from .gguf.seeing import gguf_file, tower_of
from .gguf.tokenizer import gguf_tokenizer
from .image_processor import (
    PREPROCESSOR_FILE,
    SIDE_FILES,
    ImageProcessor,
    has_tower,
    image_processor,
    tower_module,
)
from .package import AUDIO_FILE, MODEL_FILE, TEXT_ENCODER_FILE, VISION_FILE, Package, fingerprint
from .package_writing import check_paths, check_tokenizer, write_package
from .quantized.formats import QuantizedCheckpoint, read_quantized
from .rope_scaling import scaled_config
from .safetensors_files import safetensors_of
from .weights import Checkpoint, WeightWarning


def export_model(
    source: Path,
    config: RawConfig | None = None,
    tensors: Mapping[str, StoredTensor] | None = None,
    stacks: Mapping[str, StoredStack] | None = None,
    kept: Collection[str] = (),
) -> ir.Model:
    """Build the portable graph of a checkpoint folder, with lazily read weights.

    Args:
        source: the folder, or the file of ``tensors``.
        config: the content of its config.json, if already read.
        tensors: the tensors by name, if they are not in the folder's safetensors files.
        stacks: matrices among them that the graph may take together, as ``EXPERT_STACKS``, which is not
            portable; by the name of all.
        kept: types of blocks of which it may do so, and of which weights of products may be floats that know
            their blocks.

    Raises:
        UnsupportedModelError: the model family, or an option of its configuration, is not supported.
        CheckpointError: a weight is missing or does not match the configuration.
    """
    raw = read_config(source) if config is None else config
    if tensors is None and (found := _quantized(source, raw)) is not None:
        tensors = found.tensors
    checkpoint = Checkpoint(source, tensors, stacks, kept)
    model = model_from(raw, checkpoint)
    unused = checkpoint.unused()
    if (left := checkpoint.part_left_out()) is not None:
        kind = left.rpartition(".")[2]
        raise UnsupportedModelError(
            f"{source} has the {kind} '{left}', and model_type '{raw['model_type']}' has none there"
        )
    if unused:
        shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
        warnings.warn(
            f"{len(unused)} tensors of {source} are not used by model_type '{raw['model_type']}': {shown}",
            WeightWarning,
            2,
        )
    return model


def model_from(raw: RawConfig, checkpoint: Checkpoint) -> ir.Model:
    """Build the portable graph of a config.json with the tensors of a checkpoint.

    Raises:
        UnsupportedModelError: as ``export_model``.
        CheckpointError: as ``export_model``.
    """
    module = family(raw["model_type"])
    normalised = normalised_config(raw)
    check_layer_count(normalised, checkpoint)
    net = Decoder(normalised, checkpoint)
    model = net.finish(module.build(net))
    model.metadata_props[CONTEXT_LENGTH] = str(context_lengths(raw)[1])
    return model


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """A graph on its way from a checkpoint to a package.

    Args:
        model: the graph.
        folder: configuration and tokenizer of the checkpoint.
        quantization: how the weights are quantized, as a package records it; None for floats.
        passes: names of the passes that changed the graph.
        head: the graph of the draft head; None if the package gets none.
    """

    model: ir.Model
    folder: Path
    quantization: dict[str, Any] | None = None
    passes: tuple[str, ...] = ()
    head: ir.Model | None = None


Tensors = Mapping[str, StoredTensor] | None  # by name; None for those of the folder
# Returns the portable graph of a folder with a tokenizer, of a config.json, and of tensors.
Build = Callable[[Path, RawConfig, Tensors], ExportedGraph]


def encoder_models(
    source: Path, raw: RawConfig, tensors: Mapping[str, StoredTensor] | None = None
) -> tuple[ImageProcessor | AudioProcessor, dict[str, ir.Model]] | None:
    """Return what a model sees or hears with: its processor, and its graphs by the names of their files.

    Args:
        source: the checkpoint folder.
        raw: the content of its config.json.
        tensors: as for ``export_model``.

    Returns:
        None for a model that reads text only.

    Raises:
        CheckpointError: its processor of pictures or sound is missing or damaged, or a weight is.
        UnsupportedModelError: its processor, or an option of it, is not supported.
    """
    if has_tower(raw):
        processor, module = image_processor(source, raw), tower_module(raw)
        models = {VISION_FILE: module.vision_model(raw, Checkpoint(source, tensors))}
        if processor.text_use == "asks":
            models[TEXT_ENCODER_FILE] = module.text_encoder_model(raw, Checkpoint(source, tensors))
        return processor, models
    if hears(raw):
        audio_model = audio_module(raw).audio_model(raw, Checkpoint(source, tensors))
        return audio_processor(source, raw), {AUDIO_FILE: audio_model}
    return None


def sight(
    source: Path, raw: RawConfig, tensors: Mapping[str, StoredTensor] | None = None
) -> Callable[[Path], None] | None:
    """Return what writes the files with which a model sees or hears into a package; None if it does not.

    Arguments and errors are those of ``encoder_models``.
    """
    found = encoder_models(source, raw, tensors)
    if found is None:
        return None
    processor, models = found

    def write(folder: Path) -> None:
        decoder = folder / MODEL_FILE  # which a folder of what a checkpoint sees with does not have
        for file, model in models.items():
            save_model(model, folder / file, beside=decoder if decoder.is_file() else None)
        processor.write(folder)
        for name in SIDE_FILES:
            if (source / name).is_file():
                with writing(folder / name):
                    shutil.copyfile(source / name, folder / name)

    return write


def export_package(
    source: Path,
    out: Path,
    *,
    build: Build | None = None,
    change: Callable[[ExportedGraph], ExportedGraph] | None = None,
    content: str | None = None,
    progress: Progress | None = None,
    text_only: bool = False,
    rope_scaling: str | None = None,
) -> Package:
    """Export a checkpoint folder into a package.

    Args:
        source: a Hugging Face checkpoint folder, or a GGUF file.
        out: the folder of the package; must be empty or not exist.
        build: builds the portable graph; by default ``export_model``.
        change: applied to the graph before it is written, such as a quantizer. The threads that write the
            weights evaluate its lazy initializers.
        content: the fingerprint of what was exported; by default that of ``source``.
        progress: called after each tensor written.
        text_only: leave out what a model sees pictures with.
        rope_scaling: such as ``yarn:4``, in place of that of config.json, see ``scaled_config``.

    Raises:
        UsageError: ``text_only`` for a model that writes down sound or pictures, or a rope that cannot be
            scaled so far.
        OutputExistsError: ``out`` is not empty.
        UnsupportedModelError: see ``export_model``.
        CheckpointError: see ``export_model``, or the tokenizer is missing or damaged.
        OSError: a file cannot be written; the incomplete package is deleted.
    """
    raw = None if _is_gguf(source) else check_paths(source, out)  # before any work
    with opened(source, raw) as (folder, tensors, stored):
        config = check_paths(folder, out) if raw is None else raw
        if rope_scaling is not None:
            config = scaled_config(config, rope_scaling)
        check_tokenizer(folder)
        if text_only and normalised_config(config).encoder_width:
            raise UsageError(
                f"{source} writes down what its encoder hears or sees; without it, it writes nothing: omit "
                "text_only"
            )
        seen = None if text_only else sight(folder, config, tensors)
        if build is None:
            head = draft_head_model(folder, config, tensors)
            graph = ExportedGraph(export_model(folder, config, tensors), folder, stored, head=head)
        else:
            graph = replace(build(folder, config, tensors), quantization=stored)
        if change is not None:
            graph = change(graph)
        return write_package(
            graph.model,
            folder,
            out,
            quantization=graph.quantization,
            passes=graph.passes,
            progress=progress,
            config=config,
            changed=rope_scaling is not None,
            content=content or fingerprint(source),
            sight=seen,
            head=graph.head,
        )


def check_float(source: Path, stored: dict[str, Any] | None) -> None:
    """Refuse to quantize weights again.

    Args:
        source: the file.
        stored: how its weights are quantized; None for floats.

    Raises:
        UsageError: they are quantized.
    """
    if stored is not None:
        how = ", ".join(stored.get("types", [stored["method"]]))
        raise UsageError(
            f"{source} is already quantized ({how}); leave out the quantization, or take the model's float "
            "checkpoint"
        )


def _is_gguf(source: Path) -> bool:
    return source.suffix.lower() == GGUF_SUFFIX


def _quantized(folder: Path, config: RawConfig | None) -> QuantizedCheckpoint | None:
    """Return the tensors of a checkpoint folder that another tool quantized; None for floats."""
    if config is None and not (folder / CONFIG_FILE).is_file():
        return None  # ``export_model`` reports it
    config = read_config(folder) if config is None else config
    return read_quantized(config, safetensors_of(folder)) if config.get("quantization_config") else None


@contextmanager
def opened(
    source: Path, config: RawConfig | None = None
) -> Iterator[tuple[Path, Mapping[str, StoredTensor] | None, dict[str, Any] | None]]:
    """Yield a folder with configuration and tokenizer, the tensors, and their quantization.

    For a folder these are the folder itself, None and None. The metadata of a GGUF file is written to a
    temporary folder.

    Args:
        source: the folder or the GGUF file.
        config: the content of the folder's config.json, if already read.

    Raises:
        CheckpointError: the GGUF file is damaged.
        UnsupportedModelError: carryall cannot read what the GGUF file holds.
    """
    if not _is_gguf(source):
        found = _quantized(source, config)
        yield (source, None, None) if found is None else (source, found.tensors, found.record)
        return
    file = gguf_file(source, tower_of(source))
    with scratch_folder() as folder:
        write_gguf_sides(file, folder)
        yield folder, file.tensors, file.quantization


def write_gguf_sides(file: GgufFile, folder: Path, *, to_open: bool = False) -> None:
    """Write configuration, tokenizer and picture processor of a GGUF file into a folder, as a checkpoint has.

    Args:
        file: the file.
        folder: where they go.
        to_open: write the tokenizer in the form that opens quickly, see ``gguf/vocabulary.py``.

    Raises:
        CheckpointError: the file's metadata is damaged.
        UnsupportedModelError: carryall cannot read its architecture or its tokenizer.
    """
    config = file.config
    tokenizer = gguf_tokenizer(file.metadata, config.get("text_config", config)["vocab_size"])
    files = tokenizer.write_to_open(folder) if to_open else tokenizer.files()
    contents = {CONFIG_FILE: json.dumps(config), **files}
    if file.preprocessor is not None:
        contents[PREPROCESSOR_FILE] = json.dumps(file.preprocessor)
    for name, content in contents.items():
        with writing(folder / name):
            (folder / name).write_text(content, encoding="utf-8")
