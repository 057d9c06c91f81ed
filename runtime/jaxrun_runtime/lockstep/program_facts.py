"""Reads facts about a cross-process program from JAX's objects: arguments, results, ranks, and whether it communicates.

An ExecuteReplicated runs a program; a MeshExecutable is a compiled program. call_hooks.py probes their attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Operations of HLO, "ROOT %all-gather = f32[8]{0} all-gather(".
_COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|all-to-all|ragged-all-to-all|reduce-scatter|collective-\w+|send|recv)(?:-start)?\("
)


class ArgumentInfo(NamedTuple):
    """The arguments of a program, and its source, "function at file:line"."""

    in_avals: Sequence[Any]
    names: Sequence[str]
    source: str


class Lowering(NamedTuple):
    """A program that has been lowered to StableHLO (`module`) for these devices.

    parameters:   the arguments of UnloadedMeshExecutable.from_hlo, by name
    is_for_call:  whether it is compiled for a call, not ahead of time
    """

    name: str
    module: Any
    devices: Sequence[Any]
    parameters: Mapping[str, Any]
    is_for_call: bool


class CallInfo(NamedTuple):
    name: str
    in_avals: Sequence[Any]
    in_shardings: Sequence[Any]
    out_avals: Sequence[Any]
    out_shardings: Sequence[Any]
    names: Sequence[str]
    source: str


def argument_info(compiled: Any) -> ArgumentInfo:
    return _argument_info(compiled.in_avals, compiled._kept_var_idx, compiled._all_args_info)


def _argument_info(in_avals: Sequence[Any], kept: Iterable[int], all_args: Any) -> ArgumentInfo:
    debug = getattr(all_args, "debug_info", None)
    named = getattr(debug, "arg_names", None) or ()
    names = [named[i] for i in sorted(kept) if i < len(named)]
    names += [""] * (len(in_avals) - len(names))
    return ArgumentInfo(in_avals, names, str(getattr(debug, "func_src_info", None) or ""))


def lowering_info(lowering: Lowering) -> CallInfo:
    """Return the facts of a call before its program is compiled. Some shardings may still be left to XLA."""
    of = lowering.parameters
    known = _argument_info(of["global_in_avals"], of["kept_var_idx"], of["all_args_info"])
    shardings, results = of["in_shardings"], of["out_shardings"]
    return CallInfo(lowering.name, known.in_avals, shardings, of["global_out_avals"], results, *known[1:])


def is_sharded(lowering: Lowering) -> bool:
    """Return whether an argument or result is known not to be replicated, so that `communicates` will be true."""
    shardings = (*lowering.parameters["in_shardings"], *lowering.parameters["out_shardings"])
    return any(getattr(sharding, "is_fully_replicated", True) is False for sharding in shardings)


def call_info(executed: Any, args: Sequence[Any], known: ArgumentInfo | None) -> CallInfo:
    """Return the facts of a call of an ExecuteReplicated with `args`."""
    if known is None:
        import jax

        known = ArgumentInfo([jax.typeof(args[i]) for i in sorted(executed.kept_var_idx)], [""] * len(args), "")
    results = executed.out_handler
    shardings = executed.in_handler.in_shardings
    return CallInfo(executed.name, known.in_avals, shardings, results.out_avals, results.out_shardings, *known[1:])


def loaded_executable(executed: Any) -> Any:
    return executed.xla_executable


def ranks_of(executed: Any) -> set[int]:
    """Return the processes whose devices an ExecuteReplicated uses, according to its arguments and results."""
    for sharding in (*executed.in_handler.in_shardings, *executed.out_handler.out_shardings):
        found = {device.process_index for device in getattr(sharding, "device_set", ())}
        if found:
            return found
    return set()


def device_assignment(executed: Any) -> Sequence[Any]:
    """Return the devices of an ExecuteReplicated, in the order in which its program numbers them; empty if unknown."""
    shardings = (*executed.in_handler.in_shardings, *executed.out_handler.out_shardings)
    assignments = (getattr(sharding, "_device_assignment", ()) for sharding in shardings)
    return next((tuple(devices) for devices in assignments if devices), ())


def hlo_texts(executed: Any) -> list[str]:
    """Return the compiled program of an ExecuteReplicated as text. Raises any error: not all platforms show it."""
    return [module.to_string() for module in executed.xla_executable.hlo_modules()]


def communicates(executed: Any) -> bool:
    """Return whether an ExecuteReplicated exchanges data between devices; True if that cannot be known.

    The program is searched only if all its arguments and results are replicated, which is rare in training.
    """
    shardings = (*executed.in_handler.in_shardings, *executed.out_handler.out_shardings)
    if not all(getattr(sharding, "is_fully_replicated", False) for sharding in shardings):
        return True
    try:
        return any(_COLLECTIVE.search(text) for text in hlo_texts(executed))
    except Exception:
        return True  # some plugins do not show their programs
