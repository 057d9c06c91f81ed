"""One rank of each host compiles a program, and the others load what it has compiled (--compile).

The first rank that has lowered a program compiles it, whichever that is. Two programs are the same if their lowered
modules, compile options, devices, platform and the compiler are, byte for byte. A program that calls back into this
process, or that anything else ties to it, is compiled by each rank, as is one that the others cannot have from the
first: because it has ended, stands still (CompilingRank), or cannot serialize it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

from jaxrun.files.shared_memory import shared_directory
from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import jax_private
from jaxrun_runtime.compile_cache import compiler_hooks
from jaxrun_runtime.compile_cache.compiler_hooks import CompileRequest, describe_devices, is_local
from jaxrun_runtime.compile_cache.shared_programs import NOBODY, SharedPrograms
from jaxrun_runtime.identity_dict import IdentityDict

LOADED_EVENT = "/jaxrun/compile_once/loaded"  # of jax.monitoring, for each program that another rank has compiled
_CPU = "cpu"
_MAX_CODE_BYTES = 16 * 2**20  # as a rank keeps that of each program that it has loaded and still uses
_DUMPS = "xla_dump_to"  # of XLA_FLAGS: everybody is to write what it compiles
# The functions outside a program that every process finds by their names, with arguments that are no addresses.
_KNOWN_CALLS = re.compile(
    r"lapack_\w+|ApproxTopK|TopK|mhlo\.\w+|chlo\.\w+|xla\.sdy\.\w+|Sharding|SPMD\w+|annotate_device_placement"
)


def set_up(env: WorkerEnv, cores: Set[int], warn: Callable[[str], None]) -> None:
    """Let this rank share what is compiled, where --compile and JAX allow it. jax must have been imported.

    cores:  those that this rank may use while it compiles for all; it may be bound to fewer
    warn:   is told what is not possible with this JAX
    """
    if env.local_size == 1 or _DUMPS in os.environ.get("XLA_FLAGS", ""):
        return
    directory = shared_directory(env.job_id, env.attempt, env.host)
    programs = SharedPrograms(directory, env.local_size)
    compiler = _SharedCompiler(programs, cores)
    if not compiler_hooks.hook_compiler(compiler.compile):
        warn(jax_private.lacks("each rank compiles for itself, as with --compile each"))


class _SharedCompiler:
    """Compiles programs, or loads those that other ranks of this host have compiled."""

    def __init__(self, programs: SharedPrograms, cores: Set[int]) -> None:
        self._programs = programs
        self._cores = cores
        self._bound_to = os.sched_getaffinity(0)
        self._owner = os.getpid()
        self._nproc = os.environ.get("NPROC", "")
        self._machine = (len(self._bound_to), self._nproc, os.environ.get("XLA_FLAGS", ""))
        self._loaded: IdentityDict[_Loaded] = IdentityDict()  # by executable

    def compile(self, compile_here: Callable[[], Any], request: CompileRequest) -> Any:
        """Return the executable of the program, from whoever has it first."""
        if os.getpid() != self._owner:  # in a fork of the program
            return compile_here()
        code = _shareable_code(request)
        return compile_here() if code is None else self._compile_or_load(compile_here, request, code)

    def _compile_or_load(self, compile_here: Callable[[], Any], request: CompileRequest, code: bytes) -> Any:
        key = self._key(request, code)
        content = self._programs.read(key)
        if content is None:
            compiling = self._programs.claim(key)
            if not compiling:
                return self._compile_for_all(key, request.backend, compile_here)
            content = self._programs.wait_for(key, compiling) if compiling != NOBODY else None
        executable = self._load(_Loaded(key, code, request._replace(module=None)), content) if content else None
        return executable if executable is not None else compile_here()

    def _key(self, request: CompileRequest, code: bytes) -> str:
        """The name of the program, equal on the ranks for which it is the same."""
        options, devices = request.options, list(request.devices)
        if is_local(devices):
            options = compiler_hooks.without_device_numbers(options)
        machine = (*self._machine, len(os.sched_getaffinity(0)))  # as the program may bind itself to fewer cores
        facts = (request.backend.platform_version, machine, describe_devices(devices))
        digest = hashlib.sha256(repr(facts).encode())
        for part in (options.SerializeAsString(), code):
            digest.update(len(part).to_bytes(8) + part)
        return digest.hexdigest()

    def _compile_for_all(self, key: str, backend: Any, compile_here: Callable[[], Any]) -> Any:
        content = b""
        try:
            with self._on_all_cores(backend):
                executable = compile_here()
            content = _serialize(executable)
        finally:
            if content:
                self._programs.write(key, content)
            else:
                self._programs.refuse(key)  # nobody need wait for it
        return executable

    @contextlib.contextmanager
    def _on_all_cores(self, backend: Any) -> Iterator[None]:
        """Let this thread and those that the compiler starts use the cores of the ranks that wait.

        The code must be the same. XLA splits a loop into one part for each of its threads, but no more than this thread
        has cores. It has as many threads as there were cores when the backend was made, or NPROC, or devices; where
        these are more than the cores, this thread keeps to its own.
        """
        is_bound = self._bound_to != self._cores and os.sched_getaffinity(0) == self._bound_to
        is_bound = is_bound and not self._nproc and backend.local_device_count() <= len(self._bound_to)
        if is_bound:
            _bind(self._cores)
        try:
            yield
        finally:
            if is_bound:
                _bind(self._bound_to)

    def _load(self, loaded: _Loaded, content: bytes) -> Any:
        request = loaded.request
        try:
            executable = request.backend.deserialize_executable(content, request.devices, request.options)
        except Exception:  # then it is compiled here
            return None
        compiler_hooks.hook_serialization(type(executable), type(request.backend), self._serialize_loaded)
        self._loaded.set(executable, loaded)
        sys.modules["jax"].monitoring.record_event(LOADED_EVENT)
        return executable

    def _serialize_loaded(self, executable: Any) -> bytes | None:
        """Serialize one that was loaded, which XLA cannot; None if it was not.

        JAX's persistent cache gets what it was loaded from. Anybody else may load it without saying for which devices,
        so it is compiled for those of this rank.
        """
        loaded = self._loaded.get(executable)
        if loaded is None:
            return None
        content = self._programs.read(loaded.key) if compiler_hooks.is_for_cache() else None
        return content or _serialize(compiler_hooks.compile_code(loaded.request, loaded.code))


def _bind(cores: Set[int]) -> None:
    with contextlib.suppress(OSError):  # as of cores that the system has taken away since
        os.sched_setaffinity(0, cores)


class _Loaded(NamedTuple):
    """A program that another rank has compiled; `request` has no module any more."""

    key: str
    code: bytes
    request: CompileRequest


def _shareable_code(request: CompileRequest) -> bytes | None:
    """The lowered program; None if each rank must compile it."""
    if request.backend.platform != _CPU or request.host_callbacks:
        return None
    try:
        code = compiler_hooks.lowered_code(request.module)
        calls = compiler_hooks.outside_calls(request.module, code)
    except Exception:  # as of what another JAX makes
        return None
    return code if len(code) <= _MAX_CODE_BYTES and all(map(_KNOWN_CALLS.fullmatch, calls)) else None


def _serialize(executable: Any) -> bytes:
    try:
        return bytes(executable.client.serialize_executable(executable))
    except Exception:  # not every executable can be serialized
        return b""
