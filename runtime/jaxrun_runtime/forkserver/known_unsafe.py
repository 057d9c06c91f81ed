"""A file in the user's cache directory with modules that earlier fork servers found to be unsafe before a fork.

An entry is for one version of a module in one environment: the path, size and time of the package's file. The file is
only a hint: if it cannot be read or written, each job finds out itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxrun.files.compiled_programs import cache_directory
from jaxrun.protocol.settings import CACHE_AUTO

_MAX_ENTRIES = 200
_MAX_BYTES = 2**17


class KnownUnsafe(NamedTuple):
    """The known unsafe modules: for each, the version of its package and the reason."""

    entries: Mapping[str, Mapping[str, str]]

    def reason(self, name: str) -> str:
        """Return why the module is unsafe; empty if the installed version is not known to be unsafe."""
        entry = self.entries.get(name)
        return entry["reason"] if entry is not None and entry["version"] == _version(name) else ""


def read() -> KnownUnsafe:
    """Read the unsafe modules of this environment."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        with _file().open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
        texts = {
            name: {key: str(entry[key]) for key in ("version", "reason")}
            for name, entry in found.items()
            if {"version", "reason"} <= entry.keys()
        }
        return KnownUnsafe(texts)
    return KnownUnsafe({})


def add(name: str, reason: str) -> None:
    """Note that a module is unsafe, for this reason."""
    entries = dict(read().entries)
    entries.pop(name, None)
    entries[name] = {"version": _version(name), "reason": reason}
    kept = dict(list(entries.items())[-_MAX_ENTRIES:])
    with contextlib.suppress(OSError):
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        draft.write_text(json.dumps(kept, indent=1) + "\n")
        draft.replace(file)


def _file() -> Path:
    environment = f"{sys.prefix}\n{sys.version}".encode()
    name = f"not-preloaded-{hashlib.sha256(environment).hexdigest()[:16]}.json"
    return cache_directory(CACHE_AUTO, os.environ).with_name(name)


def _version(name: str) -> str:
    """Return the path, size and time of the package's file, without importing the package."""
    top = name.partition(":")[0].partition(".")[0]
    with contextlib.suppress(Exception):  # of a finder
        module = sys.modules.get(top)
        spec = module.__spec__ if module is not None else importlib.util.find_spec(top)
        if spec is not None and spec.origin:
            status = os.stat(spec.origin)
            return f"{spec.origin} {status.st_size} {status.st_mtime_ns}"
        if spec is not None:
            return " ".join(spec.submodule_search_locations or ())
    return ""
