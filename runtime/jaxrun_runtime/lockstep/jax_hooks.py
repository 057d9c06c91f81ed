"""The hooks that --lockstep puts into JAX: the rest of the private names, each behind a probe as in jaxprivate.py.

| what                           | private name                               | without it                     |
|--------------------------------|--------------------------------------------|--------------------------------|
| each program's first call      | pxla.ExecuteReplicated and its handlers    | lockstep sees compilations     |
| its later calls; holding calls | pxla.MeshExecutableFastpathData,           | lockstep sees first calls      |
|                                | jax._src.tree_util.dispatch_registry       |                                |
| what a program computes        | pxla.UnloadedMeshExecutable.from_hlo,      | lockstep sees names and shapes |
|                                | pxla.MeshExecutable                        |                                |
| what is being compiled         | the name of an event of jax.monitoring     | lockstep sees no compilations  |
| tracebacks without our frames  | jax._src.traceback_util.register_exclusion | they show frames of jaxrun     |

pxla is jax._src.interpreters.pxla. Its ExecuteReplicated runs a program where JAX's C++ dispatch knows no better, as
at the first call. MeshExecutableFastpathData tells that dispatch how to make all later calls: the tree of the results
gets one more node around it, whose making is told to us.

No hook is ever taken out again, and none catches what the functions raise that it is given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrun.protocol.flight_file import COMPILATIONS, EVERY_CALL, FIRST_CALLS, LOCKSTEP_STRICT, NOTHING

_PXLA = "jax._src.interpreters.pxla"
_COMPILES = "/backend_compile_duration"
_LISTENERS = ("register_scalar_listener", "register_event_duration_secs_listener")
_EXECUTION = {
    "ExecuteReplicated": {"xla_executable", "name", "in_handler", "out_handler", "kept_var_idx", "__weakref__"},
    "InputsHandler": {"in_shardings"},
    "ResultsHandler": {"out_avals", "out_shardings"},
}
_LOWERING = {"MeshExecutable": {"build_unsafe_call", "in_avals", "_all_args_info", "_kept_var_idx"}}
_SEEN = {
    FIRST_CALLS: "--lockstep sees the first call of each program only",
    COMPILATIONS: "--lockstep sees what is compiled, but no calls",
    NOTHING: "--lockstep sees neither calls nor what is compiled",
}


# ---- what there is


def probe_level() -> int:
    """What of the program's calls can be recorded: one of contract.flight.LEVELS."""
    if not _has_slots(_EXECUTION):
        return COMPILATIONS if _has_listeners() else NOTHING
    return EVERY_CALL if _has_fast_data() else FIRST_CALLS


def missing_features(lockstep: str) -> str:
    """What still works, where something is missing that this `lockstep` needs; empty if nothing is."""
    found = probe_level()
    lacks = {_SEEN.get(found, ""): found < EVERY_CALL}
    if found >= FIRST_CALLS:
        lacks |= {
            "--lockstep takes programs of the same name and shapes for the same": not _has_lowering(),
            "--lockstep does not see what is being compiled": not _has_listeners(),
            "tracebacks show frames of jaxrun": _find("jax._src.traceback_util", "register_exclusion") is None,
        }
    lacks["strict is not possible, so that record is what is done"] = lockstep == LOCKSTEP_STRICT and found < EVERY_CALL
    return "; ".join(text for text, true in lacks.items() if true)


def _has_listeners() -> bool:
    import jax.monitoring

    return all(hasattr(jax.monitoring, name) for name in _LISTENERS)


def _has_lowering() -> bool:
    code = getattr(getattr(_find(_PXLA, "UnloadedMeshExecutable"), "from_hlo", None), "__code__", None)
    parameters = getattr(code, "co_varnames", ())
    return parameters[:2] == ("name", "hlo") and "device_list" in parameters and _has_slots(_LOWERING)


def _has_fast_data() -> bool:
    """Whether results can be marked, which is tried out."""
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


def hook_compilations(begin: Callable[[str], None], end: Callable[[], None]) -> None:
    """Call `begin(name)` and `end()` around each compilation, in the thread that compiles."""
    if not _has_listeners():
        return
    import jax.monitoring

    def on_scalar(event: str, *_: Any, **more: Any) -> None:
        if event.endswith(_COMPILES):
            begin(str(more.get("fun_name", "")))

    def on_duration(event: str, *_: Any, **__: Any) -> None:
        if event.endswith(_COMPILES):
            end()

    jax.monitoring.register_scalar_listener(on_scalar)
    jax.monitoring.register_event_duration_secs_listener(on_duration)


def hook_lowering(lowered: Callable[[Any, Any], Any], compiled: Callable[[Any, Any], None]) -> None:
    """Call note = lowered(module, devices) before a program is compiled, and compiled(it, note) after that.

    `it` is a MeshExecutable; without a note, it is not of interest.
    """
    if not _has_lowering():
        return
    kind = _find(_PXLA, "UnloadedMeshExecutable")
    original = kind.from_hlo

    @functools.wraps(original)
    def from_hlo(name: str, hlo: Any, *args: Any, **kwargs: Any) -> Any:
        note = lowered(hlo, kwargs.get("device_list") or ())
        result = original(name, hlo, *args, **kwargs)
        if note is not None:
            compiled(result, note)
        return result

    kind.from_hlo = staticmethod(from_hlo)


def on_loaded(compiled: Any, tell: Callable[[Any], None]) -> None:
    """Call tell(executed) as soon as there is the ExecuteReplicated that runs `compiled`, a MeshExecutable."""
    build = compiled.build_unsafe_call

    def build_and_tell() -> Any:
        executed = build()
        tell(executed)
        return executed

    compiled.build_unsafe_call = build_and_tell


def hook_executions(execute: Callable[..., Any], ours: Sequence[str]) -> None:
    """Have every program that Python dispatches run by execute(original, executed, args).

    JAX leaves the files `ours` out of the tracebacks that it shows, like its own.
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


def loaded_executable(executed: Any) -> Any:
    """The executable that an ExecuteReplicated runs."""
    return executed.xla_executable


def ranks_of(executed: Any) -> set[int]:
    """The processes whose devices an ExecuteReplicated uses, as far as its arguments and results say."""
    for sharding in (*executed.in_handler.in_shardings, *executed.out_handler.out_shardings):
        found = {device.process_index for device in getattr(sharding, "device_set", ())}
        if found:
            return found
    return set()


def hook_fast_dispatch(mark: Callable[[Any], Any], made: Callable[[Any, Any], Any], *, refuse: bool) -> None:
    """Have made(program, (results,)) called, for the results, after each execution by the C++ dispatch.

    program = mark(loaded) says which program a loaded executable is, None if it is not of interest. With `refuse`,
    those that are of interest are never given to the C++ dispatch.
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
    """program → a tree of one node over one leaf, which `made` makes."""
    import jax

    class Mark:
        __slots__ = ("program",)

        def __init__(self, program: Any) -> None:
            self.program = program

    jax.tree_util.register_pytree_node(Mark, lambda mark: ((0,), mark.program), made)
    registry = _find("jax._src.tree_util", "dispatch_registry")
    return lambda program: registry.flatten(Mark(program), None)[1]
