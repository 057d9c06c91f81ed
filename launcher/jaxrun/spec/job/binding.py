"""Which cores each rank of a host stays on (--bind): those next to its GPUs, a share of its own, or all it may use.

Its memory follows: the kernel takes it from the NUMA node of the core that first writes to it. XLA starts as many
threads as a rank has cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxrun.text import parse_ranks

BIND_AUTO, BIND_GPU, BIND_CORES, BIND_NONE = BIND_MODES = ("auto", "gpu", "cores", "none")


@dataclass(frozen=True, slots=True)
class RankCores:
    """The cores that a rank may use, hardware threads of one core side by side, and those next to each of its GPUs.

    The latter as the kernel lists them, "0-31,64-95"; empty for a GPU of which it does not say.
    """

    allowed: tuple[int, ...]
    near_gpus: tuple[str, ...] = ()

    @property
    def nearby(self) -> tuple[int, ...]:
        """Those next to its GPUs, among which it may use; all, where that is not known, or would leave none."""
        if not all(self.near_gpus):
            return self.allowed
        near = {core for cores in self.near_gpus for span in parse_ranks(cores, "a GPU") for core in span}
        return tuple(core for core in self.allowed if core in near) or self.allowed


def choose_cores(mode: str, ranks: Sequence[RankCores], *, on_cpu: bool, all_cores: int) -> list[tuple[int, ...]]:
    """The cores of each rank of a host that has `all_cores`; none for a rank that is left as it is.

    In the mode "auto" nothing is chosen for ranks that Slurm, mpirun or a container has bound: that may not use all
    cores. Measured: staying on one core pays when CPU workers outnumber the cores, and costs when they do not.
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
    """Divide cores among the ranks that have the same ones; `only_crowded`: where there are fewer cores than ranks."""
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
