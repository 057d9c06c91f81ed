"""The packages that --preload auto may import before the ranks are forked, each looked at by itself.

A package is safe if its import starts no thread, makes no JAX backend, opens no socket or file and starts no process,
and if a rank that is forked after it sees nothing that it would not see after an import of its own. The fork server
checks that again at each import (jaxrun_runtime.forkserver.preload): the table says what is worth trying.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Whether a package may be imported before the fork.

    reason:   why not, where it is not safe
    modules:  the modules of it that may be imported; empty for the package and all modules in it
    """

    safe: bool
    reason: str = ""
    modules: tuple[str, ...] = ()


_SAFE = Entry(safe=True)

# By package, or by the package's name within a namespace that it shares with others.
PRELOADABLE: Mapping[str, Entry] = {
    "chex": _SAFE,
    "equinox": _SAFE,
    "flax": _SAFE,
    "jax": _SAFE,
    "optax": _SAFE,
    "orbax.checkpoint": _SAFE,
}


def preloadable(module: str) -> bool:
    """Return whether the module, "flax" or "flax.nnx", may be imported before the ranks are forked."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        entry = PRELOADABLE.get(".".join(parts[:length]))
        if entry is not None:
            return entry.safe and (not entry.modules or module in entry.modules)
    return False
