"""A provider's own runner as a decoder to compare, for graphs that nothing else can run."""

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
    """Sequences in a provider's slots."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._lengths: dict[int, int] = {}

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self._runner.info.vocab_size

    def forward(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """Append tokens [n] to each sequence. Returns logits [n, vocab] per sequence."""
        starts = {slot: self._lengths.get(slot, 0) for slot in rows}
        steps = [Row(slot, tokens, starts[slot], num_logits=len(tokens)) for slot, tokens in rows.items()]
        logits = self._runner.forward(steps)
        self._lengths |= {slot: starts[slot] + len(tokens) for slot, tokens in rows.items()}
        return {slot: one.copy() for slot, one in zip(rows, logits, strict=True)}

    def forward_together(self, rows: Mapping[int, Tokens]) -> dict[int, Logits]:
        """``forward``, which is one step for all sequences."""
        return self.forward(rows)

    def cache(self, row: int) -> dict[str, Array]:
        """Return nothing: the cache is the provider's."""
        return {}


def verify_with_provider(
    original: Path, lowered: Path, provider: Provider, bars: Bars, names: tuple[str, str]
) -> VerifyReport:
    """Compare a decoder, run by onnxruntime, with what a provider makes of its lowered graph."""
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
    """Yield what opens decoders; they are closed in the end."""
    opener = _Opener(provider)
    try:
        yield opener
    finally:
        for runner in opener.opened:
            runner.close()
