"""The files of sentence-transformers beside a checkpoint: modules, pooling and prompts of an encoder.

Layout: https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, PackageError, UnsupportedModelError
from ...records import dataclass
from ...storage.paths import stays_inside
from ..config import read_json

if TYPE_CHECKING:
    from ..weights import Checkpoint

MODULES_FILE, LENGTH_FILE = "modules.json", "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_OF_TOKENS = ("maxsim", "meanmaxsim")  # the similarities of several vectors
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")  # of torch.nn
_SIDE_FILES = (MODULES_FILE, LENGTH_FILE, PROMPTS_FILE)
_WEIGHTS = "model.safetensors"
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_KNOWN = {*_TRANSFORMERS, "Pooling", "Dense", "Normalize", "SpladePooling", "MultiVectorMask", "Dropout"}
# As the configuration of a Pooling module names them, in the order in which several are joined.
_MODES = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "last",
}
POOLING_NAMES = tuple(_MODES.values())
_LATER_MODES = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}
_PREFIX = "pooling_mode"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of ``modules.json``: its class, without the package, and its folder."""

    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Pooling:
    """How states of tokens become a vector: by modes, whose results are joined.

    ``prompt`` says whether the tokens of a prompt take part.
    """

    modes: tuple[str, ...]
    prompt: bool = True


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer behind the pooling: activation(x weight^T + bias), and x or its projection added.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out]; None for none.
        activation: a name of ``ACTIVATIONS``.
        residual: float32 [out, in] whose product with x is added; True for x itself, None for neither.
    """

    weight: Floats
    bias: Floats | None
    activation: str
    residual: Floats | bool | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts that are put before a text, by name, and the similarity that an encoder was trained for.

    ``default`` is the name of the prompt of texts for which none is given. ``mean_of_tokens`` divides the
    similarity of several vectors by the tokens of the query.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    similarity: str = "cosine"
    mean_of_tokens: bool = False


def read_modules(folder: Path) -> list[Module]:
    """Return the modules of an encoder in their order; empty without ``modules.json``.

    Raises:
        PackageError: the file is damaged.
        UnsupportedModelError: a module is not supported.
    """
    path = folder / MODULES_FILE
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        modules = [Module(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PackageError(f"{path} is no list of modules, each with a type: {error!r}") from error
    unknown = {module.kind for module in modules} - _KNOWN
    if unknown:
        raise UnsupportedModelError(
            f"{folder}: modules {', '.join(sorted(unknown))} are not supported; supported: "
            + ", ".join(sorted(_KNOWN))
        )
    outside = [module.path for module in modules if module.path and not stays_inside(module.path)]
    if outside:
        raise PackageError(f"{path} names the folder {outside[0]!r}, which lies outside")
    return modules


def read_pooling(folder: Path) -> Pooling | None:
    """Return how the encoder pools its states; None if the folder does not say.

    Raises:
        CheckpointError: the configuration is damaged.
        PackageError: see ``read_modules``.
        UnsupportedModelError: it pools in another way.
    """
    config = _config(folder, "Pooling")
    if config is None:
        return None
    stated = config.get(_PREFIX)
    if stated is None:
        names = [key.removeprefix(f"{_PREFIX}_") for key, value in config.items() if _is_mode(key) and value]
        modes = [_MODES.get(name, "") for name in sorted(names, key=[*_MODES, *names].index)]
    else:
        names = [stated] if isinstance(stated, str) else stated
        if not isinstance(names, list):
            raise CheckpointError(
                f"{folder}: '{_PREFIX}' of the module Pooling must be a name, found {stated!r}"
            )
        modes = [_LATER_MODES.get(str(name), str(name)) for name in names]
    if not modes or not set(modes) <= set(_MODES.values()):
        shown = ", ".join(map(str, names)) or "nothing"
        hint = "" if names else "; the config.json of the module Pooling is missing, or names no mode"
        raise UnsupportedModelError(
            f"{folder}: pooling by {shown} is not supported; supported: {', '.join(_MODES.values())}{hint}"
        )
    return Pooling(tuple(modes), bool(config.get("include_prompt", True)))


def read_dense(folder: Path) -> list[Dense]:
    """Return the Dense modules of an encoder in their order.

    Raises:
        CheckpointError: a configuration or a weight is damaged.
        PackageError: see ``read_modules``.
        UnsupportedModelError: an activation is not supported, or weights are a pickle.
    """
    return [_dense(folder / module.path) for module in read_modules(folder) if module.kind == "Dense"]


def read_prompts(folder: Path) -> Prompts:
    """Return the prompts and the similarity of an encoder; none, and cosine, without the file.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: the similarity is not supported.
    """
    path = folder / PROMPTS_FILE
    config = read_json(path) if path.is_file() else {}
    texts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str | None) for text in texts.values()):
        raise CheckpointError(f"{path}: 'prompts' must be texts by name, found {texts!r}")
    texts = {name: text for name, text in texts.items() if text is not None}
    if default is not None and default not in texts:
        raise CheckpointError(
            f"{path}: 'default_prompt_name' {default!r} is none of {', '.join(texts) or 'none'}"
        )
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity in _OF_TOKENS:
        return Prompts(texts, default, "dot", mean_of_tokens=similarity == "meanmaxsim")
    if similarity not in SIMILARITIES:
        raise UnsupportedModelError(
            f"{path}: similarity {similarity!r} is not supported; supported: "
            + ", ".join((*SIMILARITIES, *_OF_TOKENS))
        )
    return Prompts(texts, default, similarity)


def read_skipped(folder: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the tokens without a vector of an encoder with a MultiVectorMask, by task (query, document).

    Raises:
        CheckpointError: the configuration is damaged.
        UnsupportedModelError: only some tokens are kept, or queries are extended by masked tokens.
    """
    config, length = _config(folder, "MultiVectorMask"), folder / LENGTH_FILE
    if config is None:
        return {}
    if config.get("keep_only_token_ids") is not None:
        raise UnsupportedModelError(f"{folder}: MultiVectorMask with keep_only_token_ids is not supported")
    if length.is_file() and read_json(length).get("query_expansion") is not None:
        raise UnsupportedModelError(f"{length}: query_expansion is not supported; supported: null")
    words, tasks = config.get("skiplist_words") or [], config.get("skiplist_tasks") or ["document"]
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not all(
        isinstance(each, list) and all(isinstance(item, str) for item in each) for each in (words, tasks)
    ):
        raise CheckpointError(f"{folder}: skiplist_words and skiplist_tasks must be lists of texts")
    return dict.fromkeys(tasks, tuple(words))


def splade_pooling(folder: Path) -> tuple[str, str] | None:
    """Return the strategy and the activation of a SpladePooling module; None without one.

    Raises:
        CheckpointError: the configuration is damaged.
        UnsupportedModelError: a value is not supported.
    """
    config = _config(folder, "SpladePooling")
    if config is None:
        return None
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    for value, known in ((strategy, ("max", "sum")), (activation, ("relu", "log1p_relu"))):
        if value not in known:
            raise UnsupportedModelError(
                f"{folder}: SPLADE by {value!r} is not supported; supported: {', '.join(known)}"
            )
    return strategy, activation


def pickle_error(path: Path, new: str) -> UnsupportedModelError:
    """Return the error for weights in a pickle; ``new`` is the name of the file to convert it to."""
    return UnsupportedModelError(
        f"{path} is a pickle, which runs code of its author when it is read; convert it where you trust it: "
        f"safetensors.torch.save_file(torch.load('{path.name}', weights_only=True), '{new}')"
    )


def side_files(folder: Path) -> list[str]:
    """Return the names of the existing files of sentence-transformers, relative to ``folder``.

    Raises:
        CarryallError: one of them is damaged, or not supported.
    """
    for read in (read_pooling, read_dense, read_prompts, read_skipped, splade_pooling):
        read(folder)  # before anything is written
    parts = [module.path for module in read_modules(folder) if module.path]
    names = [*_SIDE_FILES, *(f"{part}/{name}" for part in parts for name in ("config.json", _WEIGHTS))]
    return [name for name in names if (folder / name).is_file()]


def _config(folder: Path, kind: str) -> dict[str, Any] | None:
    """Return the configuration of the first module of a kind; None if there is none."""
    for module in read_modules(folder):
        if module.kind == kind:
            path = folder / module.path / "config.json"
            return read_json(path) if path.is_file() else {}
    return None


def _is_mode(key: str) -> bool:
    return key.startswith(f"{_PREFIX}_")


def _dense(folder: Path) -> Dense:
    config = read_json(folder / "config.json")
    source = str(config.get("module_input_name", "sentence_embedding"))
    if source not in ("sentence_embedding", "token_embeddings"):
        raise UnsupportedModelError(f"{folder}: a Dense module of {source!r} is not supported")
    function = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = function.rpartition(".")[2]
    if not function.startswith("torch.nn.") or activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder}: the activation {function!r} is not supported; supported, of torch.nn: "
            + ", ".join(ACTIVATIONS)
        )
    if not (folder / _WEIGHTS).is_file():
        pickles = [name for name in ("pytorch_model.bin", "model.bin") if (folder / name).is_file()]
        if pickles:
            raise pickle_error(folder / pickles[0], _WEIGHTS)
        raise CheckpointError(f"{folder} holds no {_WEIGHTS}")
    from ..weights import Checkpoint  # imports the library of graphs, which most folders do not need

    stored = Checkpoint(folder)
    shape = _sizes(config, folder)
    bias = _array(stored, "linear.bias", shape[:1]) if config.get("bias", True) else None
    residual: Floats | bool | None = None
    if config.get("use_residual", False):
        residual = True if shape[0] == shape[1] else _array(stored, "residual.weight", shape)
    return Dense(_array(stored, "linear.weight", shape), bias, activation, residual)


def _sizes(config: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    sizes = [config.get(name) for name in ("out_features", "in_features")]
    if not all(isinstance(size, int) and 1 <= size <= 2**24 for size in sizes):
        raise CheckpointError(
            f"{folder}/config.json: out_features and in_features are {sizes}; expected sizes"
        )
    return int(sizes[0] or 0), int(sizes[1] or 0)


def _array(stored: Checkpoint, name: str, shape: tuple[int, ...]) -> Floats:
    return np.asarray(stored.tensor(name, shape).numpy(), np.float32)
