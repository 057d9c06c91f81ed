"""Chooses the cores of each rank of a host (--bind): the cores next to its GPUs, a share of its own, or all it may use.

A rank's memory follows its cores: the kernel allocates it on the NUMA node of the core that first writes to it. XLA
starts as many threads as a rank has cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from jaxrun.text import parse_ranks

BIND_AUTO, BIND_GPU, BIND_CORES, BIND_NONE = BIND_MODES = ("auto", "gpu", "cores", "none")


class RankCores(Struct, frozen=True):
    """The cores that a rank may use, hardware threads of one core side by side, and the cores next to each of its GPUs.

    The latter are in the kernel's format, "0-31,64-95"; empty for a GPU about which it says nothing.
    """

    allowed: tuple[int, ...]
    near_gpus: tuple[str, ...] = ()

    @property
    def nearby(self) -> tuple[int, ...]:
        """The allowed cores next to its GPUs; all allowed cores if those are unknown or none of them is allowed."""
        if not all(self.near_gpus):
            return self.allowed
        near = {core for cores in self.near_gpus for span in parse_ranks(cores, "a GPU") for core in span}
        return tuple(core for core in self.allowed if core in near) or self.allowed


def choose_cores(mode: str, ranks: Sequence[RankCores], *, on_cpu: bool, all_cores: int) -> list[tuple[int, ...]]:
    """Return the cores of each rank on a host with `all_cores` cores; empty for a rank that is not bound.

    In the mode "auto", ranks that Slurm, mpirun or a container has bound (they may not use all cores) are left alone.
    Measured: staying on one core pays when CPU workers outnumber the cores, and costs when they do not.
    """
    allowed = [rank.allowed for rank in ranks]
    match mode:
        case "gpu":
            chosen = [rank.nearby for rank in ranks]
        case "cores":
            chosen = _share([rank.nearby for rank in ranks])
        case "auto" if on_cpu:
            chosen = _share(allowed, only_crowded=True)
        case "auto":
            chosen = [rank.allowed if len(rank.allowed) < all_cores else rank.nearby for rank in ranks]
        case _:
            chosen = allowed
    return [() if cores == own else tuple(sorted(cores)) for cores, own in zip(chosen, allowed, strict=True)]


def _share(cores_of: Iterable[tuple[int, ...]], *, only_crowded: bool = False) -> list[tuple[int, ...]]:
    """Divide cores among ranks that have the same cores; `only_crowded`: only if there are fewer cores than ranks."""
    wanted = list(cores_of)
    chosen = list(wanted)
    for cores in set(wanted):
        ranks = [index for index, own in enumerate(wanted) if own == cores]
        count = len(ranks)
        for number, index in enumerate(ranks):
            if count > len(cores):
                chosen[index] = (cores[number % len(cores)],)
            elif not only_crowded:
                chosen[index] = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
    return chosen
