"""All errors and warnings of carryall.

    CarryallError
    |-- UsageError                invalid input or options (exit code 2)
    |   |-- UnsupportedModelError     no exporter for this model_type, rope type or feature
    |   |-- ModelNotFoundError        the name is not a package, folder, file or reachable hub id
    |   |-- OutputExistsError         the output file or folder exists
    |   |-- MissingExtraError         an optional package is missing; the message has the pip command
    |   `-- RequestError              one request is invalid; other requests are not affected
    |       |-- InvalidSamplingError      unknown or out-of-range sampling option
    |       |-- PromptTooLongError        prompt (plus what was asked for) exceeds the context
    |       |-- ChatTemplateError         missing, broken or forbidden chat template
    |       |-- UnknownModelError         the service has no model, or a model no adapter, of that name
    |       |-- UnknownObjectError        the service keeps no file, batch or the like of that id
    |       `-- UnsupportedTaskError      this model, or this version of carryall, cannot do what is asked
    |-- CheckpointError           source weights missing, truncated or of the wrong shape
    |-- PackageError              a carryall package is incomplete or corrupt
    |-- GraphError                an ONNX graph is not what a pass or a runner needs
    |   `-- VerificationError         two graphs differ by more than the stated bar
    |-- RequestFailedError        tokenizer, parser, grammar or logits processor failed on one request
    |-- ProviderError             a provider failed
    |   |-- ProviderUnavailableError  it is not available on this machine; the message has the remedy
    |   `-- ProviderRuntimeError      a run failed on the device
    |-- EngineClosedError         the engine was shut down while the request was in it
    |-- QueueFullError            the engine's queue is full; retry later
    |   `-- RateLimitError            the API key's requests or tokens are used up; retry later
    |-- AccessError               the API key is missing, unknown, or not allowed to do this
    |-- ServiceUnavailableError   the service is loading its model or shutting down
    `-- RequestCancelled          the caller cancelled this request

    CarryallWarning (UserWarning)
    `-- WeightWarning             a weight of a checkpoint is usable, but looks wrong

A message says what is wrong, with which object, and what to do. This module imports nothing of carryall, so
every folder may raise these.
"""

from __future__ import annotations

import os

DEBUG_VARIABLE = "CARRYALL_DEBUG"


def is_debugging() -> bool:
    """Return whether errors show tracebacks and graphs are checked after every pass."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


class CarryallError(Exception):
    """Base of all errors of carryall."""


class UsageError(CarryallError):
    """The input or an option is invalid; nothing was written."""


class UnsupportedModelError(UsageError):
    """No exporter supports this model family or one of its features."""


class ModelNotFoundError(UsageError):
    """The given model is not a package, a folder, a file or a reachable hub id."""


class OutputExistsError(UsageError):
    """The output file or folder already exists."""


class MissingExtraError(UsageError):
    """An optional dependency is not installed.

    Args:
        what: the feature that needs it, such as ``provider 'openvino'``.
        package: the package that cannot be imported.
        extra: the extra of carryall that installs it.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package '{package}'. Install it with: pip install 'carryall[{extra}]'"
        )


class RequestError(UsageError):
    """One request is invalid; the engine and other requests are not affected."""


class InvalidSamplingError(RequestError):
    """A sampling option is unknown or out of range."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into the context.

    The message begins as Anthropic's, ``prompt is too long: N tokens > M maximum``: coding agents look for
    these words, and then shorten their history and go on.

    Args:
        reason: what sets the maximum, and what to do.
        tokens: the tokens of the prompt, or at least so many; None if nothing is known of them.
        maximum: the most tokens of a prompt.
    """

    def __init__(self, reason: str, tokens: int | None = None, maximum: int | None = None) -> None:
        count = "" if tokens is None else f"{tokens} tokens > {maximum} maximum: "
        super().__init__(f"prompt is too long: {count}{reason}")


class ChatTemplateError(RequestError):
    """The chat template is missing, broken, or tried something forbidden."""


class UnknownModelError(RequestError):
    """The service has no model, or a model has no LoRA adapter, of that name."""


class UnknownObjectError(RequestError):
    """The service keeps no object, such as a file or a batch, of that id."""


class UnsupportedTaskError(RequestError):
    """This model, or this version of carryall, cannot do what is asked."""


class RequestFailedError(CarryallError):
    """A tokenizer, parser, grammar or logits processor failed on one request; others are not affected."""


class CheckpointError(CarryallError):
    """Source weights are missing, truncated, or of an unexpected shape."""


class PackageError(CarryallError):
    """A carryall package is incomplete or corrupt."""


class GraphError(CarryallError):
    """An ONNX graph is not what a pass or a runner needs."""


class UnsupportedAttentionError(GraphError):
    """No kernel of the target computes the attention of a graph on KV in place."""

    def refusal(self) -> UnsupportedAttentionError:
        """Return the error for a target that has no other way to compute it, with the remedy."""
        return UnsupportedAttentionError(f"{self}; the provider cpu computes it")


class VerificationError(GraphError):
    """Two graphs differ by more than the stated bar."""


class ProviderError(CarryallError):
    """A provider failed."""


class ProviderUnavailableError(ProviderError):
    """The provider is not available on this machine; the message names the reason and the remedy."""


class ProviderRuntimeError(ProviderError):
    """A run failed on the device."""


class OutOfMemoryError(ProviderRuntimeError):
    """A run needs more memory than the device has left; a shorter one may not."""


class EngineClosedError(CarryallError):
    """The engine was shut down while the request was in it."""


class QueueFullError(CarryallError):
    """The engine's waiting queue is full; retry later.

    Attributes:
        retry_after: seconds after which there may be room; 0 if that is not known.
    """

    retry_after = 0.0


class RateLimitError(QueueFullError):
    """The requests or tokens that the API key allows are used up; retry later."""


class AccessError(CarryallError):
    """The API key is missing, unknown, or not allowed to do this."""


class ServiceUnavailableError(CarryallError):
    """The service is still loading its model, or already shutting down."""


class RequestCancelled(CarryallError):  # noqa: N818 -- not an error, the caller asked for it
    """The caller cancelled this request."""


class CarryallWarning(UserWarning):
    """Base of all warnings of carryall; filter them, or turn them into errors, with ``warnings``."""


class WeightWarning(CarryallWarning):
    """A weight looks wrong; the message names the tensor."""
