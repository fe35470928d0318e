"""Verify a graph that only its provider can run, through the provider's runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...graph_opt.compare.bars import Bars
from ...graph_opt.compare.report import VerifyReport
from ...graph_opt.compare.runners import Logits, Tokens
from ...graph_opt.compare.verify import verify
from ...graph_opt.graph.lazy import Array
from ...providers.base import Provider, Row, Runner, RunnerConfig


class ProviderDecoder:
    """A decoder for ``verify`` that runs sequences in the slots of a runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._lengths: dict[int, int] = {}

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary."""
        return self._runner.info.vocab_size

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """Append tokens [n] to each sequence; return logits [n, vocab_size] per sequence."""
        starts = {slot: self._lengths.get(slot, 0) for slot in rows}
        steps = [Row(slot, tokens, starts[slot], num_logits=len(tokens)) for slot, tokens in rows.items()]
        logits = self._runner.forward(steps)
        self._lengths |= {slot: starts[slot] + len(tokens) for slot, tokens in rows.items()}
        return {slot: one.copy() for slot, one in zip(rows, logits, strict=True)}

    def forward_together(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """Call ``forward``, which already runs all sequences in one step."""
        return self.forward(rows)

    def cache(self, row: int) -> dict[str, Array]:
        """Return an empty dict: the runner does not give out its cache."""
        return {}


def verify_with_provider(
    original: Path, lowered: Path, provider: Provider, bars: Bars, names: tuple[str, str]
) -> VerifyReport:
    """Compare a decoder, run by onnxruntime, with its lowered graph, run by a provider."""
    with _decoders(provider) as open_decoder:
        return verify(original, lowered, bars=bars, names=names, open_candidate=open_decoder)


class _Opener:
    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.opened: list[Runner] = []

    def __call__(
        self, model: Path, *, slots: int, max_length: int, name: str | None = None
    ) -> ProviderDecoder:
        config = RunnerConfig(max_slots=slots, context_length=max_length)
        self.opened.append(self._provider.runner(model, config))
        return ProviderDecoder(self.opened[-1])


@contextmanager
def _decoders(provider: Provider) -> Iterator[_Opener]:
    """Yield a function that opens decoders; all are closed at the end."""
    opener = _Opener(provider)
    try:
        yield opener
    finally:
        for runner in opener.opened:
            runner.close()
