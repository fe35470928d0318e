from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_KIND_UNSPECIFIED: _ClassVar[ModelKind]
    MODEL_KIND_LANGUAGE: _ClassVar[ModelKind]
    MODEL_KIND_TENSOR: _ClassVar[ModelKind]
    MODEL_KIND_ENCODER: _ClassVar[ModelKind]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADED: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
    MODEL_STATE_UNLOADING: _ClassVar[ModelState]
MODEL_KIND_UNSPECIFIED: ModelKind
MODEL_KIND_LANGUAGE: ModelKind
MODEL_KIND_TENSOR: ModelKind
MODEL_KIND_ENCODER: ModelKind
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_UNLOADED: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_UNLOADING: ModelState

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "server_version")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    server_version: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., server_version: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "state", "provider", "vocab_size", "context_length", "max_slots", "reason", "version", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ModelState
    provider: str
    vocab_size: int
    context_length: int
    max_slots: int
    reason: str
    version: str
    kind: ModelKind
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., provider: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., max_slots: _Optional[int] = ..., reason: _Optional[str] = ..., version: _Optional[str] = ..., kind: _Optional[_Union[ModelKind, str]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[EngineStats]
    def __init__(self, models: _Optional[_Iterable[_Union[EngineStats, _Mapping]]] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("model", "running", "waiting", "slots", "kv_tokens", "idle_kv_tokens", "kv_bytes", "kv_bytes_budget", "steps", "prompt_tokens", "generated_tokens", "computed_tokens", "preemptions", "finished", "cancelled", "failed", "prefix_queries", "prefix_hits", "prefix_cached_tokens", "kv_saved_tokens", "kv_restored_tokens", "kv_lost_chunks", "proposed_tokens", "accepted_tokens", "kv_tokens_budget", "prefills_remote", "prefills_late", "prefills_failed", "prefills_foreign", "prefills_skipped")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_BUDGET_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_LOST_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_REMOTE_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_LATE_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FOREIGN_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    model: str
    running: int
    waiting: int
    slots: int
    kv_tokens: int
    idle_kv_tokens: int
    kv_bytes: int
    kv_bytes_budget: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    preemptions: int
    finished: int
    cancelled: int
    failed: int
    prefix_queries: int
    prefix_hits: int
    prefix_cached_tokens: int
    kv_saved_tokens: int
    kv_restored_tokens: int
    kv_lost_chunks: int
    proposed_tokens: int
    accepted_tokens: int
    kv_tokens_budget: int
    prefills_remote: int
    prefills_late: int
    prefills_failed: int
    prefills_foreign: int
    prefills_skipped: int
    def __init__(self, model: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., idle_kv_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_bytes_budget: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., finished: _Optional[int] = ..., cancelled: _Optional[int] = ..., failed: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., prefix_cached_tokens: _Optional[int] = ..., kv_saved_tokens: _Optional[int] = ..., kv_restored_tokens: _Optional[int] = ..., kv_lost_chunks: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., kv_tokens_budget: _Optional[int] = ..., prefills_remote: _Optional[int] = ..., prefills_late: _Optional[int] = ..., prefills_failed: _Optional[int] = ..., prefills_foreign: _Optional[int] = ..., prefills_skipped: _Optional[int] = ...) -> None: ...
