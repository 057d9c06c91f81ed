"""Lets one rank of each host compile a program; the other ranks load the executable (--compile).

The first rank that has lowered a program compiles it. Two programs are the same if their lowered modules, compile
options, devices, platform and compiler are equal, byte for byte. Each rank compiles for itself if the program calls
back into its process, or depends on the process in another way. It also does so if it cannot get the executable from
the first rank, because that rank has ended, stands still (CompilingRank) or cannot serialize it.
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

LOADED_EVENT = "/jaxrun/compile_once/loaded"  # jax.monitoring's event for a program that another rank compiled
_CPU = "cpu"
_MAX_CODE_BYTES = 16 * 2**20  # a rank keeps the code of each loaded program while it uses the program
_DUMPS = "xla_dump_to"  # a flag in XLA_FLAGS: each rank must write what it compiles
# Functions outside a program that every process finds by name, and whose arguments are not addresses.
_KNOWN_CALLS = re.compile(
    r"lapack_\w+|ApproxTopK|TopK|mhlo\.\w+|chlo\.\w+|xla\.sdy\.\w+|Sharding|SPMD\w+|annotate_device_placement"
)


def set_up(env: WorkerEnv, cores: Set[int], warn: Callable[[str], None]) -> None:
    """Let this rank share compiled programs, if --compile and JAX allow it. jax must have been imported.

    cores:  the cores that this rank may use while it compiles for all; it may be bound to fewer
    warn:   called with a line if this JAX does not allow it
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
        """Return the executable of the program: compiled here, or loaded from the rank that compiled it first."""
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
        """Return the key of the program. It is equal on two ranks if the program is the same."""
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
                self._programs.refuse(key)  # the other ranks stop waiting
        return executable

    @contextlib.contextmanager
    def _on_all_cores(self, backend: Any) -> Iterator[None]:
        """Let this thread, and threads that the compiler starts, use the cores of the ranks that wait.

        The generated code must stay the same. XLA splits a loop into one part per XLA thread, but into no more parts
        than this thread has cores. XLA has as many threads as there were cores when the backend was made, or NPROC, or
        devices. If XLA could have more threads than this rank has cores, this thread keeps its own cores.
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
        """Serialize an executable that was loaded, which XLA cannot do; None if `executable` was not loaded.

        JAX's persistent cache gets the content from which it was loaded. Other callers may load the result without
        naming devices, so for them the program is compiled for this rank's devices.
        """
        loaded = self._loaded.get(executable)
        if loaded is None:
            return None
        content = self._programs.read(loaded.key) if compiler_hooks.is_for_cache() else None
        return content or _serialize(compiler_hooks.compile_code(loaded.request, loaded.code))


def _bind(cores: Set[int]) -> None:
    with contextlib.suppress(OSError):  # the system may have taken cores away since
        os.sched_setaffinity(0, cores)


class _Loaded(NamedTuple):
    """A program that another rank compiled; the module of `request` is removed."""

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
    except Exception:  # another version of JAX may make something else
        return None
    return code if len(code) <= _MAX_CODE_BYTES and all(map(_KNOWN_CALLS.fullmatch, calls)) else None


def _serialize(executable: Any) -> bytes:
    try:
        return bytes(executable.client.serialize_executable(executable))
    except Exception:  # not every executable can be serialized
        return b""
