"""Compares programs of replicated values, which exchange nothing between ranks.

A rank may run such a program alone, to print a loss perhaps. But where all ranks run one of the same name and shapes,
as to update parameters, it is to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.worker_messages import Call

_MAX_PROGRAMS = 1024


class ReplicatedPrograms:
    """The first calls of these programs on all ranks."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        """`hosts` holds every rank of the job."""
        self._hosts = hosts
        self._calls: dict[tuple[str, str, str], dict[int, dict[str, Call]]] = {}  # group, name, key → rank → code
        self._suspects: set[tuple[str, str, str]] = set()

    def add(self, call: Call) -> None:
        if call.code and len(self._calls) < _MAX_PROGRAMS:
            ranks = self._calls.setdefault((call.group, call.name, call.key), {})
            ranks.setdefault(call.rank, {}).setdefault(call.code, call)

    def pop_mismatches(self, *, is_last: bool = False) -> list[Mapping[int, Call]]:
        """Return the calls of programs which all ranks of their group have run, but none of them alike, each once.

        A rank may be about to run the others' program, so that this must be so twice, but for the last time.
        """
        found = {key for key, ranks in self._calls.items() if self._differs(key[0], ranks)}
        certain = found if is_last else found & self._suspects
        self._suspects = found - certain
        return [{rank: next(iter(calls.values())) for rank, calls in self._calls.pop(key).items()} for key in certain]

    def _differs(self, group: str, ranks: Mapping[int, Mapping[str, Call]]) -> bool:
        has_all = ranks.keys() >= parse_group(group, len(self._hosts))
        return has_all and not set.intersection(*(set(calls) for calls in ranks.values()))
