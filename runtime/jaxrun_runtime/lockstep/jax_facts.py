"""What JAX's own objects say of a program; private names that jaxhooks.py has probed, and those of jaxlib.mlir.ir."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ELIDED = "dense_resource<__elided__>"
# To ask for the buffer of any other ends the process, in JAX 0.8.
_BUFFERED = ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")


class ArgumentInfo(NamedTuple):
    """A program's arguments, and "function at file:line"."""

    in_avals: Sequence[Any]
    names: Sequence[str]
    source: str


class CallInfo(NamedTuple):
    name: str
    in_avals: Sequence[Any]
    in_shardings: Sequence[Any]
    out_avals: Sequence[Any]
    out_shardings: Sequence[Any]
    names: Sequence[str]
    source: str


def argument_info(compiled: Any) -> ArgumentInfo:
    """Of a MeshExecutable."""
    debug = getattr(compiled._all_args_info, "debug_info", None)
    named = getattr(debug, "arg_names", None) or ()
    names = [named[i] for i in sorted(compiled._kept_var_idx) if i < len(named)]
    names += [""] * (len(compiled.in_avals) - len(names))
    return ArgumentInfo(compiled.in_avals, names, str(getattr(debug, "func_src_info", None) or ""))


def call_info(executed: Any, args: Sequence[Any], known: ArgumentInfo | None) -> CallInfo:
    """Of an ExecuteReplicated that is called with `args`."""
    if known is None:
        import jax

        known = ArgumentInfo([jax.typeof(args[i]) for i in sorted(executed.kept_var_idx)], [""] * len(args), "")
    results = executed.out_handler
    shardings = executed.in_handler.in_shardings
    return CallInfo(executed.name, known.in_avals, shardings, results.out_avals, results.out_shardings, *known[1:])


def module_text(module: Any, long: int) -> str:
    """A lowered module without locations in the source; in place of constants of more than `long` elements, ELIDED."""
    return str(module.operation.get_asm(enable_debug_info=False, large_elements_limit=long))


def constant_bytes(module: Any, long: int, printable: int) -> Iterator[bytes | memoryview]:
    """What the constants of more than `long` bytes hold, in order, unless all their elements are alike.

    Numbers that Python's buffers do not know can only be printed: up to `printable` elements of each constant.
    """
    from jaxlib.mlir import ir

    found: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name.endswith(".constant"):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in found:
        if str(operation.results[0].type.element_type) in _BUFFERED:
            content = memoryview(operation.attributes["value"])
            if content.nbytes > long and content.contiguous:
                yield content
        else:
            text = operation.get_asm(enable_debug_info=False, large_elements_limit=printable)
            if len(text) > long:
                yield text.encode()
