"""A program: a Python function over a conversation with a model."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from ...errors import UsageError
from ...options import shown
from ..api.llm import LLM
from .local import LocalModel
from .parts import checked_options
from .prompts import Model
from .service import Service
from .state import Execution, ProgramState

_PARALLEL = 64  # requests in progress of one run
_BATCH = 16  # programs in progress of one batch

Function = Callable[..., Any]

# Calling one of these runs nothing of it.
_OTHER_FUNCTIONS = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


class Run(ProgramState):
    """The conversation of a program that was run or started.

    Attributes:
        returned: what the function returned; None while it runs.
    """

    returned: Any = None
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def wait(self) -> None:
        """Wait until the program and all its requests have ended.

        Raises:
            CarryallError: a request failed.
            Exception: what the function raised.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End the requests in progress.

        Reading their variables raises ``ProgramCancelledError``, and so do adding to the conversation and
        forking it: the function ends too.
        """
        self._execution.cancelled.set()

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the function and all that it asks for.

        Raises:
            CarryallError: a request failed.
            Exception: what the function raised.
        """
        self._execution.writer = threading.get_ident()
        try:
            self.returned = function(self, *args, **kwargs)
        finally:
            self.end()
        for request in self.requests():
            request.future.result()

    def start(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the function in a thread."""

        def work() -> None:
            failed = True
            try:
                self.call(function, args, kwargs)
                failed = False
            except BaseException as error:  # noqa: BLE001 -- ``wait`` raises it
                self._error = error
            finally:
                self._execution.close(cancel=failed)

        self._thread = threading.Thread(target=work, name="carryall-program-run", daemon=True)
        self._thread.start()


class Program:
    """A function over a conversation, which runs on a model.

    Args:
        function: takes the conversation and the arguments of ``run``.
        defaults: options of sampling of all its places.
    """

    def __init__(self, function: Function, defaults: Mapping[str, Any]) -> None:
        if not callable(function):
            raise UsageError(f"a program is a function of a conversation, not {shown(function)}")
        if any(kind(function) for kind in _OTHER_FUNCTIONS):
            raise UsageError(
                f"a program is a plain function, without async and yield, not {shown(function)}: start() "
                "runs it in a thread, and stream() yields its texts"
            )
        self._function, self._defaults = function, checked_options(defaults)
        functools.update_wrapper(self, function)

    def __call__(self, conversation: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """Call the function as a part of another program."""
        return self._function(conversation, *args, **kwargs)

    def run(self, model: LLM | Service | str, /, *args: Any, **kwargs: Any) -> Run:
        """Run the program; return its conversation when all of it is there.

        Args:
            model: a model in this process, or a service or its address.
            *args: arguments of the function, behind the conversation.
            **kwargs: further ones.

        Raises:
            UsageError: the model or a part of the program is invalid.
            CarryallError: a request failed; others were cancelled.
        """
        execution = Execution(_model(model), _PARALLEL)
        run = Run(execution, self._defaults)
        done = False
        try:
            run.call(self._function, args, kwargs)
            done = True
        finally:
            execution.close(cancel=not done)
        return run

    def start(self, model: LLM | Service | str, /, *args: Any, **kwargs: Any) -> Run:
        """Run the program in a thread; its variables can be streamed. See ``run``."""
        run = Run(Execution(_model(model, read_live=True), _PARALLEL), self._defaults)
        run.start(self._function, args, kwargs)
        return run

    @overload
    def run_batch(
        self,
        model: LLM | Service | str,
        arguments: Sequence[Mapping[str, Any]],
        *,
        parallel: int = ...,
        return_errors: Literal[False] = ...,
    ) -> list[Run]: ...
    @overload
    def run_batch(
        self,
        model: LLM | Service | str,
        arguments: Sequence[Mapping[str, Any]],
        *,
        parallel: int = ...,
        return_errors: bool,
    ) -> list[Run | Exception]: ...
    def run_batch(
        self,
        model: LLM | Service | str,
        arguments: Sequence[Mapping[str, Any]],
        *,
        parallel: int = _BATCH,
        return_errors: bool = False,
    ) -> Any:
        """Run the program for several arguments at once; requests of all share batches and prefixes.

        Args:
            model: as for ``run``.
            arguments: the keyword arguments of each run.
            parallel: maximum number of programs in progress.
            return_errors: return an error in the place of a run that failed, and go on with the others.

        Returns:
            The runs, in order.

        Raises:
            UsageError: an argument is invalid.
            CarryallError: a run failed, and ``return_errors`` is False; the others were cancelled.
        """
        listed = _arguments(arguments)
        if isinstance(parallel, bool) or not isinstance(parallel, int) or not 1 <= parallel <= 1024:
            raise UsageError(f"parallel must be a number from 1 to 1024, not {shown(parallel)}")
        target = _model(model)
        executions = [Execution(target, _PARALLEL) for _ in listed]
        runs = [Run(execution, self._defaults) for execution in executions]

        def work(index: int) -> Exception | None:
            try:
                runs[index].call(self._function, (), listed[index])
            except Exception as error:
                executions[index].cancelled.set()
                if not return_errors:
                    raise
                return error
            finally:
                executions[index].close(cancel=False)
            return None

        pool = ThreadPoolExecutor(parallel, "carryall-program-run")
        try:
            errors = list(pool.map(work, range(len(listed))))
        except BaseException:
            for execution in executions:
                execution.cancelled.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return [run if error is None else error for run, error in zip(runs, errors, strict=True)]


@overload
def program(function: Function, /) -> Program: ...
@overload
def program(**defaults: Any) -> Callable[[Function], Program]: ...
def program(function: Function | None = None, /, **defaults: Any) -> Program | Callable[[Function], Program]:
    """Make a program of a function, whose first argument is the conversation.

    ``@program`` or ``@program(temperature=0, max_tokens=64)``: the options hold for all its places that set
    none of their own.

    Raises:
        UsageError: an option is no field of ``SamplingParams``, or is invalid.
    """
    if function is not None:
        return Program(function, {})
    checked_options(defaults)
    return lambda wrapped: Program(wrapped, defaults)


def _model(model: Any, *, read_live: bool = False) -> Model:
    if isinstance(model, str):
        return Service(model)
    if isinstance(model, LLM):
        return LocalModel(model, read_live=read_live)
    if not isinstance(model, Service):
        raise UsageError(f"a program runs on an LLM, a Service or an address, not {shown(model)}")
    return model


def _arguments(arguments: Any) -> list[dict[str, Any]]:
    if not isinstance(arguments, Sequence) or isinstance(arguments, str | bytes):
        raise UsageError(f"arguments must be a list of mappings, not {shown(arguments)}")
    for each in arguments:
        if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
            raise UsageError(f"the arguments of a run are a mapping by name, not {shown(each)}")
    return [dict(each) for each in arguments]
