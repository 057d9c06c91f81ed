"""What jaxrun changes of JAX's compiling and of its persistent cache: each private name behind a probe.

| what                            | private name                            | without it                        |
|---------------------------------|-----------------------------------------|-----------------------------------|
| on CPU, equal keys on all ranks | jax._src.cache_key.get,                 | on CPU, only rank 0 hits          |
|                                 | cache_key._hash_accelerator_config      |                                   |
| each host has a rank that       | jax._src.compiler._cache_write,         | over hosts, the directory must be |
| writes                          | compilation_cache.put_executable_…      | shared                            |
| whole files                     | jax._src.lru_cache.LRUCache.put         | a killed rank may leave half of a |
|                                 |                                         | file, which JAX warns of for ever |
| one rank compiles for its host  | jax._src.compiler.                      | each rank compiles                |
|                                 | backend_compile_and_load                |                                   |
| the persistent cache gets what  | the name jax._src.compilation_cache     | it is compiled once more for it   |
| another rank has compiled       |                                         |                                   |
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
    """On CPU, make the key of a program from `describe(devices)` instead of a description of this process."""
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
    """Whether all of these devices are this process's own."""
    return all(device.process_index == device.client.process_index() for device in devices)


def describe_devices(devices: Sequence[Any]) -> tuple[object, ...]:
    """Which devices these are: of one process by their places in it, so that it is alike on all ranks."""
    import jax

    local = {device.id: place for place, device in enumerate(jax.local_devices())}
    places = [(local.get(device.id), device.id if device.id not in local else None) for device in devices]
    numbers = places if is_local(devices) else [(device.id, device.process_index) for device in devices]
    return (jax.process_count(), len(local), numbers)


def without_device_numbers(options: Any) -> Any:
    """The options with the devices of this process numbered from 0, as JAX does for GPUs."""
    options = copy.deepcopy(options)
    assigned = options.device_assignment
    if assigned is not None:
        shape = assigned.replica_count(), assigned.computation_count()
        options.device_assignment = type(assigned).create(
            sys.modules["numpy"].arange(shape[0] * shape[1]).reshape(shape)
        )
    return options


def write_on_this_rank(directory: Path) -> bool:
    """Keep what this rank compiles, which is not rank 0."""
    compiler, cache = sys.modules.get("jax._src.compiler"), sys.modules.get("jax._src.compilation_cache")
    write, put = getattr(compiler, "_cache_write", None), getattr(cache, "put_executable_and_time", None)
    if write is None or put is None:
        return False
    config, started = sys.modules["jax"].config, time.time()

    @functools.wraps(write)
    def write_here(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()) -> None:
        if callbacks or seconds < config.jax_persistent_cache_min_compile_time_secs:
            return
        if _changed_at(directory / f"{key}-cache") > started:  # by another rank, where hosts share the directory
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
    """Let a file appear under its name once it is complete, in the place of one that could not be read.

    The first error is reported, as of a full disk, and nothing is written any more.
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
    """What JAX has its backend compile."""

    backend: Any
    module: Any
    devices: Any
    options: Any
    host_callbacks: Sequence[Any]


def hook_compiler(compile_program: Callable[[Callable[[], Any], CompileRequest], Any]) -> bool:
    """Have compile_program(compile_here, request) return the executable of each program that JAX compiles."""
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
    """The lowered module, without the lines of the source that it comes from."""
    from jaxlib.mlir import passmanager

    with module.context:
        copied = module.operation.clone(ip=False)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copied)
    output = io.BytesIO()
    copied.write_bytecode(output)
    return output.getvalue()


def outside_calls(module: Any, code: bytes) -> set[str]:
    """The names of the functions outside the program that it calls; `code` is the module's own."""
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
    """Compile what `lowered_code` has returned, as the request says, for nobody but this process."""
    return request.backend.compile_and_load(code, executable_devices=request.devices, compile_options=request.options)


def hook_serialization(executables: type, clients: type, serialize: Callable[[Any], bytes | None]) -> None:
    """Let serialize(executable) be the serialized executable unless it is None.

    Both classes are of XLA, and are hooked once.
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
    """Whether JAX's persistent cache is what has called, a few frames up."""
    frame = sys._getframe(1)
    for _ in range(_CACHE_FRAMES):
        if frame.f_back is None or frame.f_globals.get("__name__") == _CACHE_MODULE:
            break
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _CACHE_MODULE
