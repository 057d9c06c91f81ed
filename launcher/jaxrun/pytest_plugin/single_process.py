"""The fixture `gang` under --no-gang: one process, which is rank 0 of 1."""

from __future__ import annotations

import os
import sys
from typing import Any

from jaxrun.errors import UsageError


class SingleProcessGang:
    """What a rank's gang offers, where there are no others."""

    rank = 0
    size = 1
    local_rank = 0
    is_main = True

    def __init__(self) -> None:
        self.host = os.uname().nodename

    def __repr__(self) -> str:
        return "<gang: rank 0 of 1>"

    @property
    def devices(self) -> int:
        jax = sys.modules.get("jax")
        return len(jax.local_devices()) if jax is not None else 1

    def barrier(self, name: str = "") -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        return value

    def kill(self, rank: int) -> None:
        self._refuse("kill")

    def pause(self, rank: int) -> None:
        self._refuse("pause")

    def cut(self, rank: int) -> None:
        self._refuse("cut")

    def _refuse(self, kind: str) -> None:
        raise UsageError(f"gang.{kind} would hit pytest itself under --no-gang; run this test without that option")
