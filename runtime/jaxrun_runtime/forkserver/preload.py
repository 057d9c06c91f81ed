"""Imports modules for the program before the fork. The program sees nothing of it, and forking stays safe.

A module that leaves more behind than its code, such as a thread, cannot be unloaded. Then this process becomes a new
fork server by exec, with the same process id and channel, which leaves that module to the program:

    fork server ─ imports flax, bad ─ exec: fork server ─ imports flax ─ forks the ranks
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct, field

from jaxrun.protocol.forkserver_messages import ImportedName, Preload, Preloaded
from jaxrun_runtime.forkserver import known_unsafe
from jaxrun_runtime.forkserver.drawn_values import DrawWatch, stop_timers
from jaxrun_runtime.forkserver.fork_state import ForkState, count_blas_libraries
from jaxrun_runtime.forkserver.preload_scene import (
    OwnModuleWatch,
    as_the_program,
    import_as_line,
    recorded_output,
    recorded_reads,
)
from jaxrun_runtime.import_watch import ImportWatch

_TIME_LIMIT_S = 30.0  # no import begins after it, because imports here delay the start of the ranks
_MAX_UNSAFE = 2  # after so many unsafe modules, no more modules are imported
_MAX_REASON_CHARS = 200
# Functions that a rank replaces before the program starts, so that modules that the program imports get the new ones.
_REPLACED = (
    ("jax", "make_mesh"),
    ("jax.distributed", "initialize"),
    ("jax.experimental.multihost_utils", "reached_preemption_sync_point"),
    ("signal", "signal"),
    ("atexit", "register"),
    ("atexit", "unregister"),
    ("os", "putenv"),
    ("os", "execv"),
    ("os", "execve"),
)


Reexec = Callable[[Mapping[str, str], Mapping[str, str]], NoReturn]


class _Holder(Struct, frozen=True):
    """A module that has imported a function of _REPLACED by its name."""

    module: str
    key: str
    function: Any
    origin: str
    name: str


class Preloader(Struct):
    """Imports modules for the program in a fork server, in addition to jax.

    blas_threads:  number of threads of one pool of BLAS
    left_out:      modules that are left to the program, with the reasons
    names:         modules that have been imported
    imports_jax:   whether one of these modules has imported jax
    reads:         variables that they have read
    output:        their output, by descriptor: 1 for stdout, 2 for stderr
    """

    blas_threads: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    imports_jax: bool = False
    reads: set[str] = field(default_factory=set)
    output: dict[int, bytes] = field(default_factory=lambda: {1: b"", 2: b""})
    holders: list[_Holder] = field(default_factory=list)
    _blas_libraries: int = 0
    _state: ForkState | None = None

    def load(self, order: Preload, argv: Sequence[str], reexec: Reexec) -> Preloaded:
        """Import the modules in `order`. `argv`: the program and its arguments.

        If a module leaves something behind, calls `reexec` with the modules to leave out and the environment.
        """
        begun, environ, directory = time.monotonic(), dict(os.environ), os.getcwd()
        self._blas_libraries, self._state = count_blas_libraries(), ForkState.now()
        known, own = known_unsafe.read(), OwnModuleWatch(order.folder)
        gc.disable()  # saves a third of the imports
        try:
            with as_the_program(order.main, argv):
                for line in order.imports:
                    if line.name in self.names or line.name in self.left_out or _is_there(line.name):
                        self._note_jax(line)
                        continue
                    if time.monotonic() - begun > _TIME_LIMIT_S:
                        self.left_out[line.name] = f"the imports before it took more than {_TIME_LIMIT_S:g} s"
                    elif reason := known.reason(line.name):
                        self.left_out[line.name] = f"{reason}, as an earlier job has found"
                    elif reason := self._import(line, order, own):
                        stop_timers()
                        os.chdir(directory)
                        reexec(self._left_out_with(line.name, reason, order), environ)
        finally:
            gc.enable()
        gc.freeze()  # like earlier imports
        titles = {line.name: line.title for line in order.imports}
        left_out = {titles.get(name, name): reason for name, reason in self.left_out.items()}
        return Preloaded(tuple(titles.get(name, name) for name in self.names), left_out, time.monotonic() - begun)

    def begin_program(self) -> None:
        """In a rank, give the modules the functions that the rank has replaced, and write their recorded output."""
        for holder in self.holders:
            values = vars(sys.modules[holder.module])
            if values.get(holder.key) is holder.function:
                values[holder.key] = getattr(sys.modules[holder.origin], holder.name)
        for descriptor, text in self.output.items():
            with contextlib.suppress(OSError):
                while text:
                    text = text[os.write(descriptor, text) :]

    def _note_jax(self, line: ImportedName) -> None:
        """If this line of the program is the first that imports jax, move jax to the end of sys.modules."""
        if line.name.partition(":")[0].partition(".")[0] == "jax" and not self.imports_jax:
            watch = ImportWatch("jax", lambda _: None)
            watch.start()
            watch.stop()
            self.imports_jax = True

    def _import(self, line: ImportedName, order: Preload, own: OwnModuleWatch) -> str:
        """Import one module. Returns why it must be left to the program; empty if it was imported."""
        module = line.name.partition(":")[0]
        before, modules = self._state, set(sys.modules)
        assert before is not None
        imported_jax: list[bool] = []
        watch = ImportWatch("jax", lambda _: imported_jax.append(True))
        draws = DrawWatch() if not line.in_table else None
        if not self.imports_jax:  # otherwise jax would come after its importer in sys.modules
            watch.start()
        try:
            with recorded_output() as output, recorded_reads() as reads, own.watching():
                with draws.watching() if draws is not None else contextlib.nullcontext():
                    import_as_line(line)
        except BaseException as error:
            watch.stop()
            if isinstance(error, ModuleNotFoundError) and error.name == module and set(sys.modules) == modules:
                is_own = module.partition(".")[0] in own.wanted
                self.left_out[line.name] = "it is the program's own" if is_own else "there is no such module"
                return ""
            return f"its import failed: {type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
        watch.stop()
        new = set(sys.modules) - modules
        self._state = ForkState.now()
        reason = before.difference(self._state, self._count_new_blas_threads) or self._look_through(new)
        if reason:
            known_unsafe.add(line.name, reason)
        # What the program would notice is not remembered for other jobs, which may not notice it.
        if reason := reason or _seen_by_program(reads, order, own, draws):
            return reason
        if draws is not None:
            draws.release(new)
        self.names.append(line.name)
        self.imports_jax |= bool(imported_jax)
        self.reads |= reads
        for descriptor, text in output.items():
            self.output[descriptor] += text
        return ""

    def _count_new_blas_threads(self) -> int:
        """Count the threads of the BLAS libraries that have been loaded since the last count."""
        before, self._blas_libraries = self._blas_libraries, count_blas_libraries()
        return (self._blas_libraries - before) * self.blas_threads

    def _look_through(self, new: Iterable[str]) -> str:
        """Note the functions of _REPLACED in new modules; returns a text if one of them keeps the process id."""
        pid = os.getpid()
        origins = [(sys.modules[origin], name) for origin, name in _REPLACED if origin in sys.modules]
        functions = {id(getattr(origin, name)): (origin.__name__, name) for origin, name in origins}
        for module in new:
            for key, value in list(getattr(sys.modules.get(module), "__dict__", {}).items()):
                if type(value) is int and value == pid:
                    return f"{module} keeps the process id, as {key}"
                if id(value) in functions and functions[id(value)] != (module, key):
                    self.holders.append(_Holder(module, key, value, *functions[id(value)]))
        return ""

    def _left_out_with(self, name: str, reason: str, order: Preload) -> dict[str, str]:
        """Return the modules that a new server must leave out if this module is unsafe."""
        left_out = {**self.left_out, name: reason}
        if len(left_out) > _MAX_UNSAFE:
            names = [line.name for line in order.imports]
            later = names[names.index(name) + 1 :]
            left_out |= {each: f"it comes after {name}" for each in later if each not in left_out}
        return left_out


def _is_there(name: str) -> bool:
    """Whether the server has already imported this with jax."""
    module, _, names = name.partition(":")
    return module in sys.modules and all(each in vars(sys.modules[module]) for each in names.split(",") if each)


def _seen_by_program(reads: set[str], order: Preload, own: OwnModuleWatch, draws: DrawWatch | None) -> str:
    """Return what a program would notice of an import that has read these variables; empty if nothing."""
    if differing := sorted(reads & set(order.by_rank)):
        return f"it reads {differing[0]}, which differs by rank"
    if own.wanted:
        return f"it imports {min(own.wanted)}, and the program has its own module of that name"
    return draws.reasons[0] if draws is not None and draws.reasons else ""
