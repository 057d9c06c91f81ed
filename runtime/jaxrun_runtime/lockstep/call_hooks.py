"""The hooks that --lockstep puts into JAX, with probes for their private names and for names in program_facts.py.

| what                           | private name                               | without it                     |
|--------------------------------|--------------------------------------------|--------------------------------|
| each program's first call      | pxla.ExecuteReplicated and its handlers    | lockstep sees compilations     |
| its later calls; holding calls | pxla.MeshExecutableFastpathData,           | lockstep sees first calls      |
|                                | jax._src.tree_util.dispatch_registry       |                                |
| what a program computes        | pxla.UnloadedMeshExecutable.from_hlo,      | lockstep sees names and shapes |
|                                | pxla.MeshExecutable                        |                                |
| whether it is compiled for a   | jax._src.pjit._pjit_call_impl_python       | lockstep compares programs     |
| call                           |                                            | once they are compiled         |
| what is being compiled         | the name of an event of jax.monitoring     | lockstep sees no compilations  |
| whether it is run again, to    | jax._src.api_util's exception              | reports about such calls give  |
| find a NaN (jax_debug_nans)    | InternalFloatingPointError                 | the usual advice               |
| tracebacks without our frames  | jax._src.traceback_util.register_exclusion | they show frames of jaxrun     |

pxla is jax._src.interpreters.pxla. Its ExecuteReplicated runs a program when JAX's C++ dispatch cannot, such as at the
first call. MeshExecutableFastpathData tells the C++ dispatch how to make all later calls: the hook puts one more node
around the tree of results, and building that node calls the hook.

No hook is ever removed. No hook catches exceptions of the functions that it gets. The other private names that jaxrun
uses are in jax_private.py.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from jaxrun.protocol.flight_file import (
    COMPILATIONS,
    COMPILE,
    EVERY_CALL,
    FIRST_CALLS,
    LOCKSTEP_STRICT,
    LOWER,
    NOTHING,
    RESTORE_STATE,
    SAVE,
    TRACE,
)
from jaxrun_runtime.lockstep.program_facts import Lowering

_PXLA = "jax._src.interpreters.pxla"
_COMPILES = "/backend_compile_duration"
_STAGES = {
    "jaxpr_trace_duration": TRACE,
    "jaxpr_to_mlir_module_duration": LOWER,
    "backend_compile_duration": COMPILE,
}
# Events of orbax, on one rank, for the time in which its caller waits.
_STATE_STAGES = {
    "/jax/checkpoint/write/async/blocking_duration_secs": SAVE,
    "/jax/orbax/write/async/blocking_duration_secs": SAVE,
    "/jax/orbax/write/blocking_duration_secs": SAVE,
    "/jax/orbax/write/blocking_wait_prev_duration_secs": SAVE,
    "/jax/orbax/read/blocking_duration_secs": RESTORE_STATE,
    "/jax/orbax/read/async/blocking_duration_secs": RESTORE_STATE,
}
_LISTENERS = ("register_scalar_listener", "register_event_duration_secs_listener")
_EXECUTION = {
    "ExecuteReplicated": {"xla_executable", "name", "in_handler", "out_handler", "kept_var_idx", "__weakref__"},
    "InputsHandler": {"in_shardings"},
    "ResultsHandler": {"out_avals", "out_shardings"},
}
_LOWERING = {"MeshExecutable": {"build_unsafe_call", "in_avals", "_all_args_info", "_kept_var_idx"}}
_LOWERED = {"global_in_avals", "global_out_avals", "in_shardings", "out_shardings", "kept_var_idx", "all_args_info"}
_FOUND_NAN = ("jax._src.api_util", "InternalFloatingPointError")
_CALL_FRAMES = 8  # the most frames between a compilation and its call; JAX 0.8 to 0.12 have two
_SEEN = {
    FIRST_CALLS: "--lockstep sees the first call of each program only",
    COMPILATIONS: "--lockstep sees what is compiled, but no calls",
    NOTHING: "--lockstep sees neither calls nor what is compiled",
}


# ---- probes


def probe_level() -> int:
    """Return how much of the program's calls can be recorded: one of flight_file.LEVELS."""
    if not can_hook_executions():
        return COMPILATIONS if _has_listeners() else NOTHING
    return EVERY_CALL if _has_fast_data() else FIRST_CALLS


def can_hook_executions() -> bool:
    return _has_slots(_EXECUTION)


def missing_features(lockstep: str) -> str:
    """Return a text that says what still works if this JAX lacks something for `lockstep`; empty if it does not."""
    found = probe_level()
    lacks = {_SEEN.get(found, ""): found < EVERY_CALL}
    if found >= FIRST_CALLS:
        lacks |= {
            "--lockstep treats programs of the same name and shapes as equal": not _has_lowering(),
            "--lockstep compares programs only once they are compiled": _has_lowering() and not _has_call_code(),
            "--lockstep does not see what is being compiled": not _has_listeners(),
            "--lockstep does not see what jax_debug_nans runs again": _find(*_FOUND_NAN) is None,
            "tracebacks show frames of jaxrun": _find("jax._src.traceback_util", "register_exclusion") is None,
        }
    lacks["strict is not possible, so calls are only recorded"] = lockstep == LOCKSTEP_STRICT and found < EVERY_CALL
    return "; ".join(text for text, true in lacks.items() if true)


def _has_listeners() -> bool:
    import jax.monitoring

    return all(hasattr(jax.monitoring, name) for name in _LISTENERS)


def _has_lowering() -> bool:
    parameters = _lowering_parameters()
    return parameters[:2] == ("name", "hlo") and "device_list" in parameters and _has_slots(_LOWERING)


def _has_call_code() -> bool:
    return _call_code() is not None and set(_lowering_parameters()) >= _LOWERED


def _lowering_parameters() -> Sequence[str]:
    from_hlo = getattr(_find(_PXLA, "UnloadedMeshExecutable"), "from_hlo", None)
    return getattr(getattr(from_hlo, "__code__", None), "co_varnames", ())


def _call_code() -> Any:
    """Return the code of the function that calls a jitted function and compiles it if necessary."""
    return getattr(_find("jax._src.pjit", "_pjit_call_impl_python"), "__code__", None)


def _has_fast_data() -> bool:
    """Whether results can be marked; tries it."""
    needed = {"xla_executable", "out_pytree_def"}
    if not needed <= set(getattr(_find(_PXLA, "MeshExecutableFastpathData"), "_fields", ())):
        return False
    told: list[Any] = []

    def made(program: Any, children: Any) -> Any:
        told.append(program)
        return children[0]

    try:
        results = _find("jax._src.tree_util", "dispatch_registry").flatten([1, (2,)], None)[1]
        return bool(_node(made)("a program").compose(results).unflatten([3, 4]) == [3, (4,)] and told == ["a program"])
    except Exception:
        return False


def _has_slots(needed: dict[str, set[str]]) -> bool:
    return all(slots <= set(getattr(_find(_PXLA, kind), "__slots__", ())) for kind, slots in needed.items())


def _find(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


# ---- hooks


def hook_compilations(begin: Callable[[str], None], end: Callable[[str, str, float], None]) -> None:
    """Call `begin(name)` before each compilation, and `end(stage, name, seconds)` after each stage of one.

    A stage is one of flight_file.STAGES; `begin` is called before the last one. Both are called in the thread that
    compiles. `end` is also called for orbax's STATE_STAGES, if the main thread waits for them.
    """
    if not _has_listeners():
        return
    import jax.monitoring

    def on_scalar(event: str, *_: Any, **more: Any) -> None:
        if event.endswith(_COMPILES):
            begin(str(more.get("fun_name", "")))

    def on_duration(event: str, duration_secs: float = 0.0, *_: Any, **more: Any) -> None:
        stage = _STAGES.get(event.rpartition("/")[2])
        if stage:
            end(stage, str(more.get("fun_name", "")), duration_secs)
        elif event in _STATE_STAGES and threading.current_thread() is threading.main_thread():
            end(_STATE_STAGES[event], "by orbax", duration_secs)

    jax.monitoring.register_scalar_listener(on_scalar)
    jax.monitoring.register_event_duration_secs_listener(on_duration)


def hook_lowering(lowered: Callable[[Lowering], Any], compiled: Callable[[Any, Any], None]) -> None:
    """Call note = lowered(lowering) before a program is compiled, and compiled(executable, note) after it is.

    `executable` is a MeshExecutable; None if the compilation failed. If the note is None, `compiled` is not called.
    """
    if not _has_lowering():
        return
    kind = _find(_PXLA, "UnloadedMeshExecutable")
    original, call_code = kind.from_hlo, _call_code() if _has_call_code() else None

    @functools.wraps(original)
    def from_hlo(name: str, hlo: Any, *args: Any, **kwargs: Any) -> Any:
        is_for_call = call_code is not None and _is_below(call_code, sys._getframe(1))
        note = lowered(Lowering(name, hlo, kwargs.get("device_list") or (), kwargs, is_for_call))
        result = None
        try:
            result = original(name, hlo, *args, **kwargs)
        finally:
            if note is not None:
                compiled(result, note)
        return result

    kind.from_hlo = staticmethod(from_hlo)


def _is_below(code: CodeType, frame: FrameType | None) -> bool:
    """Whether the frame, or one of the few that called it, runs this code."""
    for _ in range(_CALL_FRAMES):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def nan_search() -> int:
    """Return a number for the search for a NaN that this thread is in; 0 if it is in none.

    With jax_debug_nans or jax_debug_infs, JAX runs a program again, operation by operation, on the ranks that have a
    NaN in its results, while it handles an exception of its own. Then it raises FloatingPointError. A search within a
    search has the number of the outer one.
    """
    error, found = sys.exception(), 0
    kind = _find(*_FOUND_NAN) or ()
    while error is not None and isinstance(error, kind):
        found, error = id(error), error.__context__
    return found


def on_loaded(compiled: Any, tell: Callable[[Any], None]) -> None:
    """Call tell(executed) as soon as JAX has made the ExecuteReplicated that runs `compiled`, a MeshExecutable."""
    build = compiled.build_unsafe_call

    def build_and_tell() -> Any:
        executed = build()
        tell(executed)
        return executed

    compiled.build_unsafe_call = build_and_tell


def hook_executions(execute: Callable[..., Any], ours: Sequence[str]) -> None:
    """Let execute(original, executed, args) run every program that Python dispatches.

    JAX leaves the files `ours` out of its tracebacks, like its own files.
    """
    kind = _find(_PXLA, "ExecuteReplicated")
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any) -> Any:
        return execute(original, self, args)

    kind.__call__ = call
    exclude = _find("jax._src.traceback_util", "register_exclusion")
    for file in (__file__, *ours) if exclude is not None else ():
        exclude(file)


def hook_fast_dispatch(mark: Callable[[Any], Any], made: Callable[[Any, Any], Any], *, refuse: bool) -> None:
    """Call made(program, (results,)) after each execution by the C++ dispatch; its return value replaces the results.

    mark(loaded) returns the program of a loaded executable, or None to leave the executable alone. With `refuse`, the
    C++ dispatch never gets an executable for which it returns a program.
    """
    module: Any = sys.modules[_PXLA]
    original = module.MeshExecutableFastpathData
    around = _node(made)

    def fast_data(*args: Any, **kwargs: Any) -> Any:
        data = original(*args, **kwargs)
        program = mark(data.xla_executable)
        if program is None:
            return data
        return None if refuse else data._replace(out_pytree_def=around(program).compose(data.out_pytree_def))

    fast_data._fields = original._fields  # type: ignore[attr-defined]
    module.MeshExecutableFastpathData = fast_data


def _node(made: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return a function that maps a program to a tree with one node over one leaf; `made` builds that node."""
    import jax

    class Mark:
        __slots__ = ("program",)

        def __init__(self, program: Any) -> None:
            self.program = program

    jax.tree_util.register_pytree_node(Mark, lambda mark: ((0,), mark.program), made)
    registry = _find("jax._src.tree_util", "dispatch_registry")
    return lambda program: registry.flatten(Mark(program), None)[1]
