"""Write a package."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from ..errors import CheckpointError, OutputExistsError
from ..graph_opt.graph.half_scales import narrowed_scales
from ..graph_opt.graph.load import load_model
from ..graph_opt.graph.saving import save_model
from ..progress import Progress
from ..storage.manifest import make_manifest
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
    stated_token,
    states_length,
)
from .package import (
    COPIED_FILES,
    DRAFT_HEAD_FILE,
    HEAD_FILES,
    MODEL_FILE,
    SIGHT_FILES,
    TEXT_ENCODER_FILE,
    TOKENIZER_FILE,
    Package,
    fingerprint,
)
from .package_record import PackageRecord, is_token


def write_package(
    model: ir.Model,
    source: Path,
    out: Path,
    *,
    quantization: dict[str, Any] | None = None,
    passes: Sequence[str] = (),
    progress: Progress | None = None,
    config: RawConfig | None = None,
    changed: bool = False,
    content: str | None = None,
    context_length: int | None = None,
    others: Sequence[str] = (),
    sight: Callable[[Path], None] | None = None,
    head: ir.Model | None = None,
) -> Package:
    """Write ``model`` and the tokenizer and configuration files of ``source`` into the folder ``out``.

    ``source`` is a checkpoint folder or another package; ``config`` is the content of its config.json, if
    already read, or, ``changed``, what is written in its place; ``content`` is the fingerprint to record, by
    default that of ``source``; ``context_length`` is recorded if config.json states none; ``others`` are
    relative paths of further files to copy; ``sight`` writes the files with which a model sees or hears, and
    ``head`` is the graph of its draft head; those of a package are copied. The other arguments are those of
    ``export_package``.

    Raises:
        OutputExistsError: ``out`` is not empty.
        CheckpointError: the checkpoint has no tokenizer.
        OSError: a file cannot be written; the incomplete package is deleted.
    """
    config = check_paths(source, out, config)
    with new_folder(out) as folder:
        with narrowed_scales(model):
            save_model(model, folder / MODEL_FILE, progress)
        if sight is not None:
            sight(folder)
        elif _sees(source) and (source / TEXT_ENCODER_FILE).is_file():
            reader = load_model(source / TEXT_ENCODER_FILE)
            save_model(reader, folder / TEXT_ENCODER_FILE, beside=folder / MODEL_FILE)
        if head is not None:
            save_model(head, folder / DRAFT_HEAD_FILE)
        kept = [*(SIGHT_FILES if sight is None and _sees(source) else ())]
        kept += HEAD_FILES if head is None and Package.is_package(source) else ()
        for name in (*COPIED_FILES, *others, *kept):
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                with writing(folder / name):
                    shutil.copyfile(source / name, folder / name)
        if not (folder / CONFIG_FILE).is_file():  # onnxruntime-genai has other files
            _write_json(folder / GENERATION_FILE, read_generation_config(source))
        if changed or not (folder / CONFIG_FILE).is_file():
            _write_json(folder / CONFIG_FILE, config)
        tokens = _read_bos_eos(source, config)
        if context_length is not None and not states_length(config):
            config = {**config, LENGTH_KEYS[0]: context_length}
        record = _make_record(folder, config, tokens, content or fingerprint(source), quantization, passes)
        record.write(folder)
    return Package(out, record)


def _sees(source: Path) -> bool:
    """Return whether a folder is a package of a model that takes pictures or sound."""
    if not Package.is_package(source):
        return False
    package = Package.unchecked(source)
    return package.sees or package.hears


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
    check_empty(out)
    config = read_config(source) if config is None else config
    _read_bos_eos(source, config)
    if not (source / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{source} holds no {TOKENIZER_FILE}. Convert a tokenizer of another form with transformers: "
            "AutoTokenizer.from_pretrained(SRC).save_pretrained(SRC)"
        )
    return config


def check_empty(out: Path) -> None:
    """Check that a folder can be written.

    Raises:
        OutputExistsError: ``out`` is not empty.
        OSError: ``out`` cannot be created.
    """
    check_place(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise _not_empty(out)


def check_tokenizer(source: Path) -> None:
    """Check that the tokenizer can be opened.

    Raises:
        CheckpointError: tokenizer.json is damaged, or needs a newer tokenizers library.
    """
    path = source / TOKENIZER_FILE
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        import importlib.metadata

        raise CheckpointError(
            f"the installed tokenizers {importlib.metadata.version('tokenizers')} cannot read {path}: {error}"
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


def _make_record(
    folder: Path,
    config: RawConfig,
    tokens: tuple[int | None, tuple[int, ...]],
    source: str,
    quantization: dict[str, Any] | None,
    passes: Sequence[str],
) -> PackageRecord:
    from importlib.metadata import version  # 10 ms, which a model that runs in place does without

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
    generation = read_generation_config(folder)
    bos, eos = (stated_token(config, generation, f"{name}_token_id") for name in ("bos", "eos"))
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for name, token in (("bos_token_id", bos), *(("eos_token_id", end) for end in ends)):
        if not is_token(token) and not (name == "bos_token_id" and token is None):
            raise CheckpointError(
                f"{folder}: '{name}' in config.json or generation_config.json must be a token id, "
                f"found {token!r}"
            )
    return bos, tuple(ends)
