"""Drafters: heads in a folder of their own that read hidden states of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...contract import HIDDEN_STATES, LOGITS
from ...errors import ProviderRuntimeError, UsageError
from ...exporter.drafters.kinds import EAGLE3, GEMMA4_ASSISTANT, MEDUSA, drafter_kind
from ...exporter.package import MODEL_FILE, fingerprint
from ...progress import Progress
from ...providers import get_provider
from ...providers.base import Provider, RunnerConfig
from ...records import dataclass
from ...storage.cache import cache_key, cached_folder
from ..engine.speculation.draft_head import BesideModel, DraftHead, HeadInputs, InPlaceOfModel
from ..engine.speculation.medusa_heads import MedusaHeads
from ..engine.speculation.proposer import Proposer
from .draft_heads import check_not_rotated
from .loaded import LoadedModel
from .lowering import lowered_model
from .model_source import CheckpointModel, SourceModel

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...graph_opt.passes.base import GraphPass

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeadOfDrafter(CheckpointModel):
    """A drafter with the tensors that it shares with a checkpoint folder, quantized as the model is.

    Args:
        drafter: the folder of the drafter.
    """

    drafter: Path = field(kw_only=True)

    def build(self, *, stored: bool = False) -> ir.Model:
        """See ``InPlaceModel``."""
        from ...exporter.drafters.registry import drafter_of
        from .building import drafter_graph

        return drafter_graph(self.folder, self.config, self.method, drafter_of(self.drafter))

    def identity(self) -> str:
        return cache_key(drafter=super().identity(), other=fingerprint(self.drafter))


def layer_states(source: SourceModel, folder: Path) -> list[GraphPass]:
    """Return the passes that add the states of layers that a drafter reads to what a model returns.

    Raises:
        UsageError: the drafter needs tensors of the model, which is no checkpoint folder; or its hidden
            states are rotated.
        UnsupportedModelError: the drafter is not for such a model.
    """
    check_not_rotated(source)
    if drafter_kind(folder) == MEDUSA:
        return []
    from ...exporter.drafters.registry import drafter_of
    from ...graph_opt.lower.outputs.hidden_states import LayerStatesPass

    if not isinstance(source, CheckpointModel):
        raise UsageError(
            f"{source.name} is no checkpoint folder, so the drafter {folder} cannot share its embedding; run "
            "the checkpoint, with --quantize if it is to be quantized"
        )
    return [LayerStatesPass(drafter_of(folder).layers(source.config))]


def open_drafter(
    source: SourceModel,
    config: RunnerConfig,
    progress: Progress | None,
    model: LoadedModel,
    folder: Path,
    limit: Mapping[str, Any],
) -> Proposer:
    """Return the proposer of the drafter in a folder, which runs where its model does.

    Args:
        source: the model.
        config: options of its runner.
        progress: called for every tensor written.
        model: the same model, loaded with the passes of ``layer_states``.
        folder: the folder.
        limit: ``max_tokens``, if it is not that of the drafter.

    Raises:
        UsageError: the model's runner returns no such states.
    """
    info, kind = model.runner.info, drafter_kind(folder)
    if not (info.embedding_size if kind == MEDUSA else info.layer_states):
        raise UsageError(
            f"provider '{model.provider}' returns no states of layers of {model.name}, which the drafter "
            f"{folder} reads; choose provider cpu, or prompt-lookup"
        )
    target = get_provider(model.provider)
    config = replace(config, max_loras=0)
    if kind == MEDUSA:
        return _medusa(folder, target, config, model, limit)
    from ...exporter.drafters.registry import drafter_of

    assert isinstance(source, CheckpointModel)  # noqa: S101 -- checked by ``layer_states``
    tokens = drafter_of(folder).draft_tokens()
    head = HeadOfDrafter(source.name, source.folder, source.model_path, method=source.method, drafter=folder)
    runner = target.runner(lowered_model(head, target, config, progress), config)
    inputs: dict[str | None, HeadInputs] = {
        EAGLE3: BesideModel(runner.info.hidden_width, info.embedding_size),
        GEMMA4_ASSISTANT: InPlaceOfModel(),
    }
    return DraftHead(runner, inputs=inputs[kind], vocabulary=tokens, **limit)


def _medusa(
    folder: Path, target: Provider, config: RunnerConfig, model: LoadedModel, limit: Mapping[str, Any]
) -> MedusaHeads:
    """Return the proposer of Medusa heads, whose graph is lowered as those of towers are.

    Raises:
        UsageError: the heads are for a model of other sizes.
    """

    def build(place: Path) -> None:
        from ...exporter.drafters.medusa import medusa_graph
        from ...graph_opt.graph.saving import save_model
        from ...graph_opt.pipeline.pipeline import run

        heads = medusa_graph(folder)
        save_model(run(heads, target.tower_passes(config, heads))[0], place / MODEL_FILE)

    form = target.tower_form(config)
    key = cache_key(medusa=fingerprint(folder), provider=target.name, form=form)
    about = {"model": folder.name, "provider": target.name}
    session = target.session(cached_folder("lowered", key, build, about) / MODEL_FILE, config)
    (states,), (logits,) = session.get_inputs(), session.get_outputs()
    sizes = (states.shape[1], logits.shape[2])
    wanted = (model.runner.info.embedding_size, model.runner.info.vocab_size)
    if sizes != wanted:
        raise UsageError(
            f"the heads of {folder} are for a model with hidden size {sizes[0]} and {sizes[1]} tokens; "
            f"{model.name} has {wanted[0]} and {wanted[1]}"
        )

    def guess(rows: Floats) -> Floats:
        try:
            found: Floats = session.run([LOGITS], {HIDDEN_STATES: rows})[0]
        except Exception as error:  # onnxruntime raises errors of many types
            raise ProviderRuntimeError(f"the heads of {folder} failed: {error}") from error
        return found

    count = min(limit.get("max_tokens", logits.shape[1]), logits.shape[1])
    return MedusaHeads(guess, count, states.shape[1])
