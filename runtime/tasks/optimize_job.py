"""The graph and the passes of ``carryall optimize``, which a bisection creates several times."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir

from ...errors import UsageError
from ...graph_opt.graph.load import load_model
from ...graph_opt.passes.base import pass_name
from ...graph_opt.pipeline.kind import not_generating
from ...graph_opt.pipeline.pipelines import model_passes, portable_passes
from ...graph_opt.pipeline.plugins import load_pass
from ...providers import get_provider, provider_names
from ...providers.base import Provider, RunnerConfig
from ...records import dataclass
from ..models.graphs import default_context_length, load_graph
from ..models.model_source import locate_model

PORTABLE = "portable"


@dataclass(frozen=True)
class OptimizeJob:
    """An optimization, from which graph and passes can be created several times.

    Attributes:
        source: the model.
        target: ``portable`` or a provider.
        own: specifications of the user's own passes.
        disable: names of the passes to leave out.
        context_length: maximum tokens of a sequence; None takes the model's own.
        explicit: use the target's passes for graphs whose attention no kernel computes in place.
    """

    source: str
    target: str
    own: tuple[str, ...]
    disable: tuple[str, ...]
    context_length: int | None
    explicit: bool = False

    def make(self) -> tuple[ir.Model, list[ir.passes.PassBase]]:
        """Load the graph and create the passes: portable ones, the user's own, then those of the target.

        Raises:
            UsageError: there is no such target or pass, or the context length of a decoder is unknown.
        """
        graph, _ = load_graph(self.source)
        own_passes = [load_pass(spec) for spec in self.own]
        if self.not_decoder is None:
            return graph, [*portable_passes(), *own_passes, *self._lowering(graph)]
        provider = self.provider()
        if provider is None:
            return graph, model_passes(own_passes)
        return graph, model_passes([*own_passes, *provider.model_passes()], provider.kept_products())

    @functools.cached_property
    def not_decoder(self) -> str | None:
        """Why the source is no decoder; None for a package, a checkpoint, or an ONNX file of a decoder."""
        path = locate_model(self.source)
        return None if path.is_dir() else not_generating(load_model(path))

    def make_enabled(self) -> tuple[ir.Model, list[ir.passes.PassBase]]:
        """``make`` without the disabled passes."""
        graph, passes = self.make()
        return graph, [pass_ for pass_ in passes if pass_name(pass_) not in self.disable]

    def _lowering(self, graph: ir.Model) -> Sequence[ir.passes.PassBase]:
        provider = self.provider()
        if provider is None:
            return []
        context_length = self.context_length or default_context_length(self.source, graph)
        if context_length is None:
            raise UsageError("the graph does not state its context length; add --context-length")
        config = RunnerConfig(context_length=context_length)
        return (provider.explicit_passes(config) if self.explicit else None) or provider.passes(config)

    def provider(self) -> Provider | None:
        """Return the provider of the target, None for ``portable``.

        Raises:
            UsageError: there is no such target.
        """
        if self.target == PORTABLE:
            return None
        if self.target not in provider_names():
            known = ", ".join([PORTABLE, *provider_names()])
            raise UsageError(f"unknown target '{self.target}'; choose one of {known}")
        return get_provider(self.target)
