"""How often proposed tokens turn out right."""

from __future__ import annotations

from dataclasses import dataclass, field

_DECAY = 0.9  # of what is known of a request with each further trial
_SHARED_DECAY = 0.98
_PRIOR = 0.6
_WEIGHT = 3.0  # trials that the prior is worth


@dataclass(slots=True)
class _Trials:
    """Decaying counts of tokens tried, and of those accepted."""

    tried: float = 0.0
    accepted: float = 0.0

    def rate(self, prior: float) -> float:
        return (_WEIGHT * prior + self.accepted) / (_WEIGHT + self.tried)

    def observe(self, accepted: int, rejected: bool, decay: float) -> None:
        self.tried = decay * self.tried + accepted + rejected
        self.accepted = decay * self.accepted + accepted


@dataclass(slots=True)
class Acceptance:
    """The chance of each proposed token to be accepted once those before it were, by request and evidence.

    A request begins with what others of the same evidence have shown. Tokens behind a rejected one were not
    tried, and count neither way.
    """

    _shared: dict[int, _Trials] = field(default_factory=dict)
    _own: dict[str, dict[int, _Trials]] = field(default_factory=dict)

    def rate(self, request_id: str, evidence: int) -> float:
        """The chance of a request's next proposed token."""
        shared = self._shared.get(evidence)
        rate = _PRIOR if shared is None else shared.rate(_PRIOR)
        own = self._own.get(request_id, {}).get(evidence)
        return rate if own is None else own.rate(rate)

    def observe(self, request_id: str, evidence: int, accepted: int, *, rejected: bool) -> None:
        """Take note of a proposal's fate."""
        self._shared.setdefault(evidence, _Trials()).observe(accepted, rejected, _SHARED_DECAY)
        own = self._own.setdefault(request_id, {})
        own.setdefault(evidence, _Trials()).observe(accepted, rejected, _DECAY)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._own.pop(request_id, None)
