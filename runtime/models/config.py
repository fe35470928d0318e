"""Options of a model: its source, provider, quantization, limits and speculation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...errors import UsageError
from ...exporter.rope_scaling import parse_rope_scaling
from ...graph_opt.quantize.methods import METHODS
from ...options import Checked, check_names, declared, option, shown
from ...providers import has_argument
from ...records import dataclass
from ..engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """Options of a model: its source, provider, quantization, limits and speculation.

    Args:
        model: any form of MODEL: ``demo``, a package, a checkpoint, a hub id, a GGUF or ONNX file; see
            ``docs/models.md``.
        provider: where the model runs, see ``carryall doctor``. ``auto`` measures all providers and takes the
            fastest, with the CPU for the layers that its devices do not hold; ``cuda:1`` chooses a device,
            ``cpu:0-11,openvino:12-27`` splits the layers, ``cuda,cpu`` does so by free memory
            and measured bandwidth, and ``cpu@process:...`` runs a part in a separate process.
        tensor_parallel: cut the model by weights over this many processes on the provider ``cpu``, which run
            the same steps: each reads its part of the weights and holds its part of the KV cache.
        numa: with ``tensor_parallel``: ``auto`` binds the threads and the memory of each process to a NUMA
            node, so that it reads its weights from its own memory. ``off`` binds none.
        pipeline: cut the model by layers into stages on the nodes of the Ray cluster at this address, each
            with its own weights and KV cache: ``auto``, ``local``, ``HOST:PORT`` of its head, or
            ``ray://HOST:PORT`` of Ray's client server.
        pipeline_stages: with ``pipeline``: the number of stages; by default 2.
        device: the provider's name of the device: ``1``, ``GPU.1``.
        provider_options: options of the provider, such as ``compute=bf16``.
        tower_provider: where pictures and sound are encoded, such as ``openvino:GPU``; by default where the
            decoder runs. Another provider than the decoder's has its default options.
        ep_library: an ONNX Runtime plugin library to run on, in place of ``provider``.
        allow_fallback: run nodes that the provider cannot run on the CPU, and report them.
        quantize: quantize the weights with this method, in the cache; by default they are not changed.
        kv_cache_dtype: type of the KV cache; by default int8 if the model has scales for it, else the
            provider's choice: carryall's CPU kernels choose int8 for int4 weights and ``bfloat16``, which
            only they have, for int8 weights.
        context_length: maximum tokens of a sequence, prompt and output together; by default the model's own.
        rope_scaling: extend the context by a scaling of the rotary embedding, in place of the model's own:
            ``yarn:4`` makes it 4 times as long; or ``linear:2``, ``dynamic:2``. For checkpoints and GGUF
            files; the longer context is then the default of ``context_length``.
        num_threads: CPU threads; 0 lets the provider choose.
        speculative: speculative decoding with ``prompt-lookup``, with ``mtp``, the model's own head for
            further tokens (``mtp:FOLDER``: with a head from another folder), or with ``draft:MODEL``, a
            smaller model of the same tokenizer, or a drafter of the model. It changes the speed, not
            the result.
        num_speculative_tokens: maximum tokens proposed at a time; by default the limit of the method.
        chat_template: a file with a Jinja chat template, in place of the checkpoint's own.
        tool_prompt: describe the tools of a chat in a message if the chat template has no place for them.
        loras: LoRA adapters of PEFT that requests choose by name, each a folder. May be repeated.
        max_loras: maximum number of adapters that are resident at once; requests for others wait for a place.
            By default the number of adapters in ``loras``; with 0, the model has no branches for adapters.
        max_lora_rank: maximum rank of an adapter; by default 16, or the largest rank in ``loras``.
        lora_modules: linear layers that adapters can change, such as ``q_proj``; by default all except the
            head. Fewer layers make steps faster.

    Raises:
        UsageError: a value has a wrong type, is out of range, or needs an option that is not given.
    """

    model: str | Path = option(flags=("MODEL",))
    provider: str = option("cpu", flags=("--provider", "--split"))
    tensor_parallel: int = option(1, least=1, most=64)
    numa: Literal["auto", "off"] = "off"
    pipeline: str | None = None
    pipeline_stages: int | None = option(None, least=2, most=64)
    device: str | int | None = None
    provider_options: Mapping[str, Any] = option({}, flags=("--provider-option",))
    tower_provider: str | None = None
    ep_library: Path | None = None
    allow_fallback: bool = False
    quantize: str | None = option(None, choices=METHODS)
    kv_cache_dtype: Literal["int8", "bfloat16", "float32"] | None = None
    # Without upper bounds: the model and the machine limit these at load.
    context_length: int | None = option(None, least=1, most=math.inf, unit="tokens")
    rope_scaling: str | None = None
    num_threads: int = option(0, least=0, most=math.inf)
    speculative: str | None = None
    num_speculative_tokens: int | None = option(None, least=1)
    chat_template: Path | None = None
    tool_prompt: bool = True
    loras: Mapping[str, Any] = option({}, flags=("--lora",))
    max_loras: int | None = option(None, least=0)
    max_lora_rank: int | None = option(None, least=1)
    lora_modules: tuple[str, ...] = option((), flags=("--lora-module",))

    def __post_init__(self) -> None:
        """Check each value, then their combination."""
        Checked.__post_init__(self)
        if not has_argument(self.provider) and not all(map(str.strip, self.provider.split(","))):
            raise UsageError(
                f"provider {shown(self.provider)} has an empty name; name a provider (cpu), places "
                "(cuda,cpu) or ranges of layers (cuda:0-11,cpu:12-27)"
            )
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling)
        if self.num_speculative_tokens is not None and self.speculative is None:
            raise UsageError(
                "num_speculative_tokens has no effect without speculative: set it to prompt-lookup, "
                "mtp or draft:MODEL"
            )
        for name, folder in self.loras.items():
            if not isinstance(folder, str | Path) or not str(folder) or not name:
                raise UsageError(f"loras must map names to folders, found {name!r}: {folder!r}")
        object.__setattr__(self, "loras", {name: str(folder) for name, folder in self.loras.items()})
        if self.loras and self.max_loras == 0:
            raise UsageError(f"{len(self.loras)} loras are given, but max_loras is 0; raise it")
        given = [name for name in ("max_lora_rank", "lora_modules") if getattr(self, name)]
        if given and not self.adapters_at_once:
            raise UsageError(f"{given[0]} has no effect without adapters: set loras or max_loras")
        if self.tensor_parallel > 1 and self.adapters_at_once:
            raise UsageError(
                f"tensor_parallel {self.tensor_parallel} cannot be combined with LoRA adapters; omit one"
            )
        if self.numa == "auto" and self.tensor_parallel == 1:
            raise UsageError(
                "numa binds the processes of tensor_parallel; set that to the number of NUMA nodes"
            )
        if self.pipeline_stages is not None and self.pipeline is None:
            raise UsageError(
                "pipeline_stages has no effect without pipeline: set it to the address of a cluster"
            )
        if self.pipeline is not None and (self.adapters_at_once or self.tensor_parallel > 1):
            other = "LoRA adapters" if self.adapters_at_once else "tensor_parallel"
            raise UsageError(f"pipeline cannot be combined with {other}; omit one")
        if self.ep_library is not None and self.provider != "cpu":
            raise UsageError(
                f"ep_library replaces provider, but both are given: {self.ep_library} and "
                f"{self.provider}; omit one"
            )

    @property
    def adapters_at_once(self) -> int:
        """The maximum number of resident adapters."""
        return len(self.loras) if self.max_loras is None else self.max_loras


def model_config(model: str | Path | ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return ``model`` as a ``ModelConfig``, with ``fields`` set.

    Raises:
        UsageError: a field is unknown, its value is not allowed, or ``model`` is empty or of a wrong type.
    """
    check_names(fields, declared(ModelConfig), "a model")
    if isinstance(model, ModelConfig):
        return dataclasses.replace(model, **fields)
    if not isinstance(model, str | Path) or not str(model):
        raise UsageError(f"a model must be a string, a path or a ModelConfig, not {shown(model)}")
    return ModelConfig(model=model, **fields)


def split_fields(fields: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into fields of ``ModelConfig`` and fields of ``EngineConfig``.

    Args:
        fields: arguments by name.
        owner: the class or function that takes them, for the message.

    Raises:
        UsageError: a name is a field of neither; the message has the nearest name.
    """
    of_model, of_engine = declared(ModelConfig), declared(EngineConfig)
    check_names(fields, {**of_model, **of_engine}, owner)
    return (
        {name: value for name, value in fields.items() if name in of_model},
        {name: value for name, value in fields.items() if name in of_engine},
    )
