"""Placeholders for a rank in words that all ranks share: those of --wrap and, with --expand-args, the program's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxrun.protocol.env import WorkerEnv

_PLACEHOLDER = re.compile("%([rlh%])")


def fill_in(words: Iterable[str], worker: WorkerEnv) -> list[str]:
    """Replace %r, %l and %h by the rank, the local rank and the host, and %% by %."""
    values = {"r": str(worker.rank), "l": str(worker.local_rank), "h": worker.host, "%": "%"}
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in words]
