"""Hooks into JAX's compilation and its persistent cache, each private name behind a probe.

| what                            | private name                            | without it                        |
|---------------------------------|-----------------------------------------|-----------------------------------|
| on CPU, equal keys on all ranks | jax._src.cache_key.get,                 | on CPU, only rank 0 finds         |
|                                 | cache_key._hash_accelerator_config      | programs                          |
| each host has a rank that       | jax._src.compiler._cache_write,         | over hosts, the directory must be |
| writes                          | compilation_cache.put_executable_…      | shared                            |
| whole files                     | jax._src.lru_cache.LRUCache.put         | a killed rank may leave half of a |
|                                 |                                         | file; JAX warns about it forever  |
| one rank compiles for its host  | jax._src.compiler.                      | each rank compiles                |
|                                 | backend_compile_and_load                |                                   |
| the persistent cache gets       | the name jax._src.compilation_cache     | they are compiled once more for   |
| programs of other ranks         |                                         | the cache                         |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrun.files.own_files import write_whole_file

_CPU = "cpu"
_CALL_OUTSIDE, _CALLEE = "custom_call", "call_target_name"  # an operation of StableHLO, and its attribute
_CACHE_MODULE, _CACHE_FRAMES = "jax._src.compilation_cache", 8
_COMPILE_PARAMETERS = ("backend", "module", "executable_devices", "options", "host_callbacks")


# ---- JAX's persistent cache


def make_keys_alike(describe: Callable[[Sequence[Any]], bytes]) -> bool:
    """Make the keys of programs for CPUs from `describe(devices)` instead of a description of this process.

    Returns whether this JAX allows it.
    """
    cache_key = sys.modules.get("jax._src.cache_key")
    get, hash_config = getattr(cache_key, "get", None), getattr(cache_key, "_hash_accelerator_config", None)
    if get is None or hash_config is None:
        return False

    @functools.wraps(get)
    def get_key(module: Any, devices: Any, options: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if backend.platform == _CPU and is_local(list(devices.flat)):
            options = without_device_numbers(options)
        return get(module, devices, options, backend, *args, **kwargs)

    @functools.wraps(hash_config)
    def hash_devices(digest: Any, devices: Any, *args: Any) -> None:
        if devices.flat[0].platform == _CPU:
            digest.update(describe(list(devices.flat)))
        else:
            hash_config(digest, devices, *args)

    cache_key.get, cache_key._hash_accelerator_config = get_key, hash_devices  # type: ignore[union-attr]
    return True


def is_local(devices: Sequence[Any]) -> bool:
    """Whether all of these devices belong to this process."""
    return all(device.process_index == device.client.process_index() for device in devices)


def describe_devices(devices: Sequence[Any]) -> tuple[object, ...]:
    """Describe devices. Devices of this process are described by position, so the description is equal on all ranks."""
    import jax

    local = {device.id: place for place, device in enumerate(jax.local_devices())}
    places = [(local.get(device.id), device.id if device.id not in local else None) for device in devices]
    numbers = places if is_local(devices) else [(device.id, device.process_index) for device in devices]
    return (jax.process_count(), len(local), numbers)


def without_device_numbers(options: Any) -> Any:
    """Return a copy of the options with the devices of this process numbered from 0, as JAX does for GPUs."""
    options = copy.deepcopy(options)
    assigned = options.device_assignment
    if assigned is not None:
        shape = assigned.replica_count(), assigned.computation_count()
        options.device_assignment = type(assigned).create(
            sys.modules["numpy"].arange(shape[0] * shape[1]).reshape(shape)
        )
    return options


def write_on_this_rank(directory: Path) -> bool:
    """Write programs that this rank compiles to the cache, although it is not rank 0. Returns whether JAX allows it."""
    compiler, cache = sys.modules.get("jax._src.compiler"), sys.modules.get("jax._src.compilation_cache")
    write, put = getattr(compiler, "_cache_write", None), getattr(cache, "put_executable_and_time", None)
    if write is None or put is None:
        return False
    config, started = sys.modules["jax"].config, time.time()

    @functools.wraps(write)
    def write_here(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()) -> None:
        if callbacks or seconds < config.jax_persistent_cache_min_compile_time_secs:
            return
        if _changed_at(directory / f"{key}-cache") > started:  # another rank wrote it: the hosts share the directory
            return
        with contextlib.suppress(Exception):  # not every executable can be serialized
            put(key, name, executable, backend, int(seconds))

    compiler._cache_write = write_here  # type: ignore[union-attr]
    return True


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def write_whole_files(report: Callable[[str], None]) -> bool:
    """Let a file of the cache appear under its name only once it is complete. Returns whether this JAX allows it.

    report:  called with the first error, such as a full disk; nothing is written after it
    """
    kind = getattr(sys.modules.get("jax._src.lru_cache"), "LRUCache", None)
    put = getattr(kind, "put", None)
    if put is None:
        return False
    failed = False

    @functools.wraps(put)
    def put_whole(cache: Any, key: str, value: bytes) -> None:
        nonlocal failed
        directory = os.fspath(getattr(cache, "_path", ""))
        if getattr(cache, "eviction_enabled", True) or "://" in directory:
            put(cache, key, value)
        elif not failed:
            try:
                write_whole_file(os.path.join(directory, f"{key}-cache"), value)
            except OSError as error:
                failed = True
                report(error.strerror or str(error))

    kind.put = put_whole  # type: ignore[union-attr]
    return True


# ---- one rank compiles for its host


class CompileRequest(NamedTuple):
    """The arguments with which JAX asks its backend to compile a program."""

    backend: Any
    module: Any
    devices: Any
    options: Any
    host_callbacks: Sequence[Any]


def hook_compiler(compile_program: Callable[[Callable[[], Any], CompileRequest], Any]) -> bool:
    """Let compile_program(compile_here, request) make the executable of each program. Returns whether JAX allows it."""
    compiler = sys.modules.get("jax._src.compiler")
    original = getattr(compiler, "backend_compile_and_load", None)
    code = getattr(inspect.unwrap(original), "__code__", None) if original is not None else None
    if original is None or code is None or code.co_varnames[: code.co_argcount] != _COMPILE_PARAMETERS:
        return False

    @functools.wraps(original)
    def backend_compile_and_load(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(_COMPILE_PARAMETERS):
            return original(*args, **kwargs)
        return compile_program(functools.partial(original, *args), CompileRequest(*args))

    compiler.backend_compile_and_load = backend_compile_and_load  # type: ignore[union-attr]
    return True


def lowered_code(module: Any) -> bytes:
    """Return the lowered module as bytes, without its source lines."""
    from jaxlib.mlir import passmanager

    with module.context:
        copied = module.operation.clone(ip=False)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copied)
    output = io.BytesIO()
    copied.write_bytecode(output)
    return output.getvalue()


def outside_calls(module: Any, code: bytes) -> set[str]:
    """Return the names of functions outside the program that it calls; `code` is `lowered_code(module)`."""
    if _CALL_OUTSIDE.encode() not in code:
        return set()
    from jaxlib.mlir import ir

    found: set[str] = set()

    def visit(operation: Any) -> Any:
        if operation.name.endswith(_CALL_OUTSIDE):
            found.add(ir.StringAttr(operation.attributes[_CALLEE]).value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def compile_code(request: CompileRequest, code: bytes) -> Any:
    """Compile the result of `lowered_code` as the request says, for this process only."""
    return request.backend.compile_and_load(code, executable_devices=request.devices, compile_options=request.options)


def hook_serialization(executables: type, clients: type, serialize: Callable[[Any], bytes | None]) -> None:
    """Use serialize(executable) as the serialized executable unless it is None. Both classes are XLA's.

    A class that is hooked already is left alone.
    """
    for kind, name in ((executables, "serialize"), (clients, "serialize_executable")):
        _wrap(kind, name, serialize)


def _wrap(kind: type, name: str, serialize: Callable[[Any], bytes | None]) -> None:
    original = getattr(kind, name, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        known = serialize(args[-1])
        return original(*args, **kwargs) if known is None else known

    setattr(kind, name, method)


def is_for_cache() -> bool:
    """Whether JAX's persistent cache is among the callers, a few frames up."""
    frame = sys._getframe(1)
    for _ in range(_CACHE_FRAMES):
        if frame.f_back is None or frame.f_globals.get("__name__") == _CACHE_MODULE:
            break
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _CACHE_MODULE
