"""Reads what a program can see of its own process, as a JSON value, so that two processes can be compared name by name.

Uses only the standard library, and imports only modules that importing jax imports, too.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from module_values import read_values

_SIGNAL_MASKS = ("SigBlk", "SigIgn", "SigCgt")


def read_state() -> dict[str, Any]:
    """Return the whole state. Each value is a mapping, a list or a scalar of JSON."""
    state: dict[str, Any] = {
        "sys.modules": list(sys.modules),
        "import hooks": _import_hooks(),
        "sys.path": list(sys.path),
        "sys.argv": {"argv": sys.argv, "orig_argv": sys.orig_argv},
        "__main__": _main_module(),
        "cwd": {"directory": os.getcwd(), "umask": _umask()},
        "warnings filters": [repr(one) for one in warnings.filters],
        "logging": _logging(),
        "random generators": _generators(),
        "temporary directory": sorted(os.listdir(os.environ.get("TMPDIR", "/tmp"))),
        "atexit": atexit._ncallbacks(),
        "open files": _open_files(),
        "threads": _threads(),
        "children": _children(),
        "signal handlers": _signal_handlers(),
        "environment": dict(os.environ),
        "jax.config": _jax_options(),
        "jax backends": _jax_backends(),
        "interpreter": _interpreter(),
    }
    state["values"], state["held locks"], state["own values"] = read_values()
    return state


def _import_hooks() -> dict[str, list[str]]:
    return {
        "meta_path": [_type_name(one) for one in sys.meta_path],
        "path_hooks": [_type_name(one) for one in sys.path_hooks],
        "__import__": [_type_name(__import__), getattr(__import__, "__module__", "")],
    }


def _type_name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    watched = getattr(value, "_name", None)  # which module one of jaxrun's own finders watches
    return f"{name}({watched})" if isinstance(watched, str) else name


def _main_module() -> dict[str, str]:
    main = sys.modules["__main__"]
    return {name: type(value).__name__ for name, value in vars(main).items()} | {
        "__file__ is": str(getattr(main, "__file__", None)),
        "__spec__ is": str(getattr(main, "__spec__", None)),
    }


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _logging() -> dict[str, str]:
    """Return the root logger, all loggers with their own level, handler or switch, and global settings."""
    found = {
        "disabled below": str(logging.root.manager.disable),
        "logger class": logging.getLoggerClass().__qualname__,
        "record factory": getattr(logging.getLogRecordFactory(), "__qualname__", "?"),
        "last resort": type(logging.lastResort).__name__,
        "captures warnings": str(warnings.showwarning.__module__),
    }
    for name, logger in [("root", logging.root), *sorted(logging.root.manager.loggerDict.items())]:
        if isinstance(logger, logging.Logger):
            handlers = [f"{type(one).__module__}.{type(one).__qualname__}:{one.level}" for one in logger.handlers]
            found[name] = f"{logger.level} {handlers} {logger.propagate} {logger.disabled} {len(logger.filters)}"
    return found


def _generators() -> dict[str, str]:
    """Return a digest of the state of each global generator."""
    found = {"random": _digest(random.getstate())}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        with suppress(AttributeError):
            found["numpy.random"] = _digest(repr(numpy.random.get_state()))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = _digest(torch.initial_seed())
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _open_files() -> list[str]:
    """Return the targets of the descriptors, without the kernel's numbers of pipes and sockets."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            found.append(target.partition(":[")[0].replace(str(os.getpid()), "PID"))
    return sorted(found)


def _threads() -> dict[str, Any]:
    tasks = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            tasks.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return {"of Python": sorted(one.name for one in threading.enumerate()), "of the kernel": sorted(tasks)}


def _children() -> list[str]:
    found: list[str] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            for child in Path(f"/proc/self/task/{task}/children").read_text().split():
                found.append(Path(f"/proc/{child}/comm").read_text().strip())
    return sorted(found)


def _signal_handlers() -> dict[str, str]:
    found = {}
    for number in sorted(signal.valid_signals()):
        handler: Any = signal.getsignal(number)
        if handler not in (signal.SIG_DFL, signal.SIG_IGN):
            found[f"signal {int(number)}"] = getattr(handler, "__qualname__", repr(handler))
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _SIGNAL_MASKS:
            found[name] = value.strip()
    return found


def _jax_options() -> Mapping[str, str]:
    jax: Any = sys.modules.get("jax")
    return {} if jax is None else {name: repr(value) for name, value in sorted(jax.config.values.items())}


def _jax_backends() -> list[str]:
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return [] if bridge is None else sorted(bridge._backends)


def _interpreter() -> dict[str, str]:
    return {
        "recursion limit": str(sys.getrecursionlimit()),
        "switch interval": str(sys.getswitchinterval()),
        "excepthook": getattr(sys.excepthook, "__module__", "?"),
        "displayhook": getattr(sys.displayhook, "__module__", "?"),
        "unraisablehook": getattr(sys.unraisablehook, "__module__", "?"),
        "threading.excepthook": getattr(threading.excepthook, "__module__", "?"),
        "trace": repr(sys.gettrace()),
        "profile": repr(sys.getprofile()),
        "stdout": f"{type(sys.stdout).__name__} {getattr(sys.stdout, 'encoding', '')}",
        "stderr": f"{type(sys.stderr).__name__} {getattr(sys.stderr, 'encoding', '')}",
        "bytecode": str(sys.dont_write_bytecode),
    }
