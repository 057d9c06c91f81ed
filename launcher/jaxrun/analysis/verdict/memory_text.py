"""Writes in one sentence that the memory of a host will soon be full, which ranks grow, and where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.protocol.agent_messages import MemoryShortage
from jaxrun.text import agree, format_bytes, format_ranks


def format_shortage(shortages: Sequence[MemoryShortage], host: str, dumps: Mapping[int, str]) -> str:
    """Return the sentence about one host, of whose agents each sent one of `shortages`.

    dumps:  by rank, the Python stacks of the ranks that grow; empty for a rank that did not answer
    """
    worst = min(shortages, key=lambda one: one.full_in_s)
    ranks = sorted({rank for one in shortages for rank in one.growing})
    rate = f"{format_bytes(worst.growth)}/s"
    used = f"{format_bytes(worst.used)} of {format_bytes(worst.limit)} are used"
    if ranks:
        places = Counter(str(users[0]) for dump in dumps.values() if (users := main_stack(dump).users))
        where = f" at {places.most_common(1)[0][0]}" if places else ""
        growth = f"{format_ranks(ranks)} {agree('grows', len(ranks))} by {rate}{where}"
    else:
        growth = f"processes that are not ranks of this job grow by {rate}"
    return f"the memory of {host} will be full in {worst.full_in_s:.0f} s: {used}, {growth}"
