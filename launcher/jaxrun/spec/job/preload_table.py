"""The packages that --preload auto may import before the ranks are forked, each examined individually.

A package is safe if its import starts no thread or process, makes no JAX backend, and opens no socket or file, and if
a rank that is forked afterwards sees nothing that it would not see after its own import. The fork server checks this
again at each import (jaxrun_runtime.forkserver.preload): the table only says which imports are worth trying.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Entry(Struct, frozen=True):
    """Whether a package may be imported before the fork.

    reason:   why not, if it is not safe
    modules:  those of its modules that may be imported; empty for the package and all modules in it
    """

    safe: bool
    reason: str = ""
    modules: tuple[str, ...] = ()


_SAFE = Entry(safe=True)
_MAKES_BACKEND = "makes JAX arrays when it is imported, which starts JAX's backend and its threads"

# By package, or by the package's name within a namespace that it shares with others. docs/startup.md has the examined
# versions; scripts/preload-check compares, for each, what a program sees with and without preloading.
PRELOADABLE: Mapping[str, Entry] = {
    "PIL": _SAFE,
    "absl": _SAFE,
    "blackjax": Entry(safe=False, reason=_MAKES_BACKEND),
    "brax": _SAFE,
    "chex": _SAFE,
    "datasets": _SAFE,
    "diffrax": _SAFE,
    "distrax": _SAFE,
    "einops": _SAFE,
    "equinox": _SAFE,
    "flax": _SAFE,
    "grain": _SAFE,
    "h5py": _SAFE,
    "haiku": _SAFE,
    "huggingface_hub": _SAFE,
    "hydra": _SAFE,
    "jax": _SAFE,
    "jaxopt": _SAFE,
    "jaxtyping": _SAFE,
    "keras": _SAFE,
    "lineax": _SAFE,
    "matplotlib": _SAFE,
    "mpi4py": Entry(safe=True, modules=("mpi4py",)),  # mpi4py.MPI calls MPI_Init, once for each rank
    "netket": Entry(safe=False, reason=f"{_MAKES_BACKEND}, and sets jax_enable_x64"),
    "numpyro": _SAFE,
    "omegaconf": _SAFE,
    "optax": _SAFE,
    "optimistix": _SAFE,
    "orbax.checkpoint": _SAFE,
    "pandas": _SAFE,
    "pyarrow": _SAFE,
    "safetensors": _SAFE,
    "scipy": _SAFE,
    "seaborn": _SAFE,
    "sklearn": _SAFE,
    "tensorstore": _SAFE,
    "tokenizers": _SAFE,
    "tqdm": _SAFE,
    "transformers": _SAFE,
    "tyro": _SAFE,
    "yaml": _SAFE,
}


def preloadable(module: str) -> bool:
    """Return whether the module, "flax" or "flax.nnx", may be imported before the ranks are forked."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        entry = PRELOADABLE.get(".".join(parts[:length]))
        if entry is not None:
            return entry.safe and (not entry.modules or module in entry.modules)
    return False
