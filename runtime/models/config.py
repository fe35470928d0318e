"""Which model is loaded, where it runs, and how."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import UsageError
from ...graph_opt.quantize.methods import METHODS
from ...options import Checked, check_names, declared, option, shown
from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """Which model is loaded, where it runs, and how.

    Args:
        model: ``demo``, a package, a Hugging Face folder or hub id, or an ONNX file beside its tokenizer.
        provider: where the model runs, see ``carryall doctor``; ``auto`` tries all providers and takes the
            fastest, ``cuda:1`` takes one of a provider's devices, ``cpu:0-11,openvino:12-27`` splits the
            layers, and ``cpu@process:...`` uses a process of its own.
        device: which of the provider's devices, as it calls them: ``1``, ``GPU.1``.
        provider_options: settings of the provider's own, such as ``compute=bf16``.
        ep_library: a plugin library of ONNX Runtime to run on, in place of ``provider``.
        allow_fallback: let nodes that the provider cannot run lie on the CPU, and say which.
        quantize: quantize the weights first, in the cache; by default they stay as they are.
        kv_cache_dtype: type of the KV cache; by default int8 where the model has scales for it.
        context_length: most tokens of a sequence, prompt and output together; by default the model's own.
        num_threads: CPU threads; 0 lets the provider choose.
        speculative: how to propose tokens that the model checks several at a time: ``prompt-lookup``, or
            ``draft:MODEL`` with a smaller model of the same tokenizer. It changes the speed, not the result.
        num_speculative_tokens: most tokens proposed at a time; by default the method's own limit.
        chat_template: a file with a Jinja chat template, in place of the checkpoint's own.

    Raises:
        UsageError: a value is of another type, out of range, or needs an option that is not given.
    """

    model: str | Path = option(flags=("MODEL",))  # noqa: RUF009 -- makes a field
    provider: str = option("cpu", flags=("--provider", "--split"))
    device: str | int | None = None
    provider_options: Mapping[str, Any] = option({}, flags=("--provider-option",))
    ep_library: Path | None = None
    allow_fallback: bool = False
    quantize: str | None = option(None, choices=METHODS)
    kv_cache_dtype: Literal["int8", "float32"] | None = None
    # Without largest values: they are compared with the model and the machine.
    context_length: int | None = option(None, least=1, most=math.inf)
    num_threads: int = option(0, least=0, most=math.inf)
    speculative: str | None = None
    num_speculative_tokens: int | None = option(None, least=1)
    chat_template: Path | None = None

    def __post_init__(self) -> None:
        """Check each value, then what they say together."""
        Checked.__post_init__(self)
        if self.num_speculative_tokens is not None and self.speculative is None:
            raise UsageError(
                "num_speculative_tokens has no effect without speculative: say prompt-lookup or draft:MODEL"
            )
        if self.ep_library is not None and self.provider != "cpu":
            raise UsageError(
                f"ep_library takes the place of provider, and both are given: {self.ep_library} and "
                f"{self.provider}; leave one out"
            )


def model_config(model: str | Path | ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """``model`` with some fields set.

    Raises:
        UsageError: a field is unknown or its value is not allowed, or there is no model.
    """
    check_names(fields, declared(ModelConfig), "a model")
    if isinstance(model, ModelConfig):
        return dataclasses.replace(model, **fields)
    if not isinstance(model, str | Path) or not str(model):
        raise UsageError(f"a model is a text, a path or a ModelConfig, not {shown(model)}")
    return ModelConfig(model=model, **fields)


def split_fields(fields: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments by what they are fields of: ``ModelConfig``, and ``EngineConfig``.

    Args:
        fields: arguments by name.
        owner: whose they are, for the message.

    Raises:
        UsageError: a name is a field of neither; the message has the nearest name.
    """
    of_model, of_engine = declared(ModelConfig), declared(EngineConfig)
    check_names(fields, {**of_model, **of_engine}, owner)
    return (
        {name: value for name, value in fields.items() if name in of_model},
        {name: value for name, value in fields.items() if name in of_engine},
    )
