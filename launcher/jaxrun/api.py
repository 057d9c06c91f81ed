"""What `import jaxrun` offers: Gang, with map and a notebook's ways, and launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxrun import RUNTIME
from jaxrun.gang.call import CellSources, Display
from jaxrun.gang.gang import BaseGang, Results, remote_function


class Gang(BaseGang):
    """A warm job of `processes` ranks with `devices` devices each; started at once, closed by `close` or a `with`.

    hosts:     simulated hosts of this machine, or with backend="mpirun" or "slurm" real ones
    env:       variables for all ranks
    run_dir:   where logs, events and the verdict go; a second start gets run_dir-2; None for none that are kept
    options:   more words for jaxrun's command line, such as "--partition", "debug"

    Raises UsageError for what cannot be, GangStartError with the launcher's own words where it did not start. Threads
    may use it: calls follow each other.
    """

    def map(
        self,
        f: Callable[..., Any],
        xs: Any,
        *,
        chunk: int | str = "auto",
        in_axes: Any = 0,
        static: Mapping[str, Any] | None = None,
        jax: bool = True,
    ) -> Any:
        """`f` of each item of `xs`, over all devices of all ranks; results in order.

        xs:       arrays that are mapped along `in_axes` (as of jax.vmap: an axis, None, or containers of these), or
                  lists of numbers; in dicts, tuples and lists
        chunk:    items that a device gets at once; "auto": by the time that they take
        static:   further arguments of `f`, by name, which are not mapped
        jax:      False for a Python function: it is called item by item on all ranks, and the results are a list

        The function is vmapped and compiled; what it returns for n items has n rows, as numpy arrays in the containers
        that it returns. NotTraceable, a TypeError, where JAX cannot compile it.
        """
        from jaxrun.map import gang_map

        return gang_map.map(self, f, xs, chunk=chunk, in_axes=in_axes, static=static, jax=jax)

    def imap(
        self,
        f: Callable[..., Any],
        xs: Iterable[Any],
        *,
        chunk: int | str = "auto",
        static: Mapping[str, Any] | None = None,
        jax: bool = True,
    ) -> Iterator[Any]:
        """The same for any iterable of items, which are taken as they are needed: an iterator over the results."""
        from jaxrun.map import gang_map

        return gang_map.imap(self, f, xs, chunk=chunk, static=static, jax=jax)

    def explain(self) -> str:
        """What the last map on this gang has chosen: chunks, devices, and how fast it was."""
        from jaxrun.map.stats import last_stats

        return str(last_stats(self) or "this gang has mapped nothing yet")

    # ---- the variables of a notebook's cells

    def __getitem__(self, name: str) -> Results:
        """What a variable of the %%gang cells is on each rank."""
        return self.run(remote_function(f"{RUNTIME}.notebook_cells", "get_variable"), name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Give all ranks a variable of this value, for the %%gang cells."""
        self.run(remote_function(f"{RUNTIME}.notebook_cells", "set_variable"), name, value)

    __iter__ = None  # it is no sequence

    def _make_display(self) -> Display:
        if "IPython" in sys.modules:
            from jaxrun.notebook import display, ipython

            if (shell := ipython.find_kernel_shell()) is not None:
                return display.NotebookDisplay(shell)
        return super()._make_display()

    def _make_sources(self) -> CellSources | None:
        if "IPython" in sys.modules:
            from jaxrun.notebook import ipython

            return ipython.find_sources()
        return None


def launch(
    fn: Callable[..., Any],
    *args: Any,
    processes: int | None = None,
    devices: int | None = None,
    timeout: float | None = None,
    **more: Any,
) -> Results:
    """Call `fn(*args)` on every rank of a job that is started for it, and ends with it.

    `more`: what Gang takes besides, and keyword arguments for `fn`.
    """
    own = {name: more.pop(name) for name in _OF_A_GANG if name in more}
    with Gang(processes, devices, **own) as gang:
        return gang.run(fn, *args, timeout=timeout, **more)


_OF_A_GANG = ("hosts", "backend", "platform", "env", "lockstep", "run_dir", "options")
