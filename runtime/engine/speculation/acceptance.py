"""How often proposed tokens turn out right."""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 16.0  # tokens tried that count, of a request
# When a proposal is wrong at once, the text may have changed: so much of a request's successes is forgotten.
_DOUBT = 0.25
_SHARED_MEMORY = 256.0
_PRIOR = 0.6
_WEIGHT = 2.0  # tokens that the prior is worth


@dataclass(slots=True)
class _Trials:
    """Decaying counts of tokens tried, and of those accepted."""

    tried: float = 0.0
    accepted: float = 0.0

    def rate(self, prior: float) -> float:
        return (_WEIGHT * prior + self.accepted) / (_WEIGHT + self.tried)

    def doubt(self) -> None:
        lost = _DOUBT * self.accepted
        self.tried, self.accepted = self.tried - lost, self.accepted - lost

    def observe(self, accepted: int, rejected: bool, memory: float) -> None:
        decay = (1.0 - 1.0 / memory) ** (accepted + rejected)
        self.tried = decay * self.tried + accepted + rejected
        self.accepted = decay * self.accepted + accepted


@dataclass(slots=True)
class Acceptance:
    """The chance of each proposed token to be accepted once those before it were, by request and evidence.

    A request begins with what others of the same evidence have shown. Tokens behind a rejected one were not
    tried, and count neither way.
    """

    _shared: dict[object, _Trials] = field(default_factory=dict)
    _own: dict[str, dict[object, _Trials]] = field(default_factory=dict)

    def rate(self, request_id: str, evidence: object) -> float:
        """The chance of a request's next proposed token."""
        shared = self._shared.get(evidence)
        rate = _PRIOR if shared is None else shared.rate(_PRIOR)
        own = self._own.get(request_id, {}).get(evidence)
        return rate if own is None else own.rate(rate)

    def observe(self, request_id: str, evidence: object, accepted: int, *, rejected: bool) -> None:
        """Take note of a proposal's fate."""
        self._shared.setdefault(evidence, _Trials()).observe(accepted, rejected, _SHARED_MEMORY)
        own = self._own.setdefault(request_id, {})
        trials = own.setdefault(evidence, _Trials())
        if rejected and not accepted:
            trials.doubt()
        trials.observe(accepted, rejected, _MEMORY)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._own.pop(request_id, None)
