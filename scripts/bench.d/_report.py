"""What a benchmark prints and leaves in a directory: a table, its samples as JSON, and a plot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """Where and with what the numbers came about; `load` is that of the minute before."""

    date: str
    cores: int
    load: float
    python: str
    jax: str

    def __str__(self) -> str:
        versions = f"Python {self.python}, JAX {self.jax}"
        return f"{self.cores} cores, load {self.load} at the start, {versions}, {self.date}"


def this_machine() -> Machine:
    return Machine(
        date=time.strftime("%Y-%m-%d %H:%M"),
        cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        jax=importlib.metadata.version("jax"),
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Aligned text; the first `left` columns stand to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def keep(
    out: Path,
    name: str,
    machine: Machine,
    summaries: Sequence[Any],
    samples: Sequence[Any],
    draw: Callable[[Any], Any],
) -> list[Path]:
    """Write OUT/NAME.json and, where matplotlib is installed, OUT/NAME.png; returns what was written.

    Summaries and samples are dataclasses; `draw` makes a figure with the pyplot that it is given.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.json"]
    content = {
        "machine": asdict(machine),
        "summary": [asdict(one) for one in summaries],
        "samples": [asdict(one) for one in samples],
    }
    written[0].write_text(json.dumps(content, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot

        written.append(out / f"{name}.png")
        draw(matplotlib.pyplot).savefig(written[1], dpi=120)
    return written
