"""Every error carryall raises on purpose.

    CarryallError
    |-- UsageError                the caller asked for something that cannot be (exit code 2)
    |   |-- UnsupportedModelError     no exporter for this model_type, rope type or feature
    |   |-- ModelNotFoundError        the name is no package, folder, file or reachable hub id
    |   |-- OutputExistsError         the output folder is not empty
    |   |-- MissingExtraError         an optional package is needed; carries the pip line
    |   `-- RequestError              one request is at fault; the engine and its neighbours live on
    |       |-- InvalidSamplingError      unknown or out-of-range sampling option
    |       |-- PromptTooLongError        prompt (plus what was asked for) exceeds the context
    |       |-- ChatTemplateError         missing, broken or forbidden chat template
    |       |-- UnknownModelError         the service has no model of that name
    |       |-- UnknownObjectError        the service keeps no file, batch or the like of that id
    |       `-- UnsupportedTaskError      this model, or this version of carryall, cannot do what is asked
    |-- CheckpointError           source weights missing, truncated or of the wrong shape
    |-- PackageError              a carryall package is incomplete or corrupt
    |-- GraphError                an ONNX graph is not what a pass or a runner needs
    |   `-- VerificationError         two graphs differ by more than the stated bar
    |-- RequestFailedError        one request met a fault that is not its own; its neighbours live on
    |-- ProviderError             an execution provider failed
    |   |-- ProviderUnavailableError  it cannot load here; says which library and what to do
    |   `-- ProviderRuntimeError      a run failed on the device
    |-- EngineClosedError         the engine was shut down while the request was in it
    |-- QueueFullError            the engine refused admission; retry later
    |-- ServiceUnavailableError   the service is loading its model or shutting down
    `-- RequestCancelled          the caller cancelled this request

    CarryallWarning (UserWarning)
    `-- WeightWarning             a checkpoint's weights are usable, but not what they should be

A message says what is wrong, with which thing, and what to do about it. This module imports nothing
of carryall, so that every folder may raise these.
"""

from __future__ import annotations

DEBUG_VARIABLE = "CARRYALL_DEBUG"  # if set, tracebacks are shown, and graphs checked after every pass


class CarryallError(Exception):
    """Base of all errors raised on purpose."""


class UsageError(CarryallError):
    """The caller asked for something that cannot be done; nothing was written."""


class UnsupportedModelError(UsageError):
    """No exporter knows this model family or one of its features."""


class ModelNotFoundError(UsageError):
    """The given model is neither a package, a folder, a file nor a reachable hub id."""


class OutputExistsError(UsageError):
    """The output folder already holds something."""


class MissingExtraError(UsageError):
    """An optional dependency is not installed.

    Args:
        what: the thing asked for, such as ``provider 'openvino'``.
        package: the import that failed.
        extra: the carryall extra that brings it.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the package '{package}'. Install it with: pip install 'carryall[{extra}]'"
        )


class RequestError(UsageError):
    """One request is at fault; the engine and all other requests live on."""


class InvalidSamplingError(RequestError):
    """A sampling option is unknown or out of range."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into the context."""


class ChatTemplateError(RequestError):
    """The chat template is missing, broken, or tried something forbidden."""


class UnknownModelError(RequestError):
    """The service has no model of that name."""


class UnknownObjectError(RequestError):
    """The service keeps no object, such as a file or a batch, of that id."""


class UnsupportedTaskError(RequestError):
    """This model, or this version of carryall, cannot do what is asked."""


class RequestFailedError(CarryallError):
    """A tokenizer, parser, grammar or logits processor failed on one request; all other requests live on."""


class CheckpointError(CarryallError):
    """Source weights are missing, truncated, or of an unexpected shape."""


class PackageError(CarryallError):
    """A carryall package is incomplete or corrupt."""


class GraphError(CarryallError):
    """An ONNX graph is not what a pass or a runner needs."""


class VerificationError(GraphError):
    """Two graphs differ by more than the stated bar."""


class ProviderError(CarryallError):
    """An execution provider failed."""


class ProviderUnavailableError(ProviderError):
    """The provider cannot load on this machine; the message names the library and the remedy."""


class ProviderRuntimeError(ProviderError):
    """A run failed on the device."""


class EngineClosedError(CarryallError):
    """The engine was shut down while the request was in it."""


class QueueFullError(CarryallError):
    """The engine's waiting queue is full; retry later.

    Attributes:
        retry_after: seconds after which there may be room.
    """

    retry_after = 1.0


class ServiceUnavailableError(CarryallError):
    """The service is still loading its model, or already shutting down."""


class RequestCancelled(CarryallError):  # noqa: N818 -- not a fault, the caller's own wish
    """The caller cancelled this request."""


class CarryallWarning(UserWarning):
    """Base of all warnings that carryall gives; filter or raise them with the ``warnings`` module."""


class WeightWarning(CarryallWarning):
    """A weight looks wrong; the message names the tensor."""
