"""The terminal for a rank's debugger."""

from __future__ import annotations

import sys
from typing import Any

import pytest


class DebuggerTerminal:
    """Belongs to the debugger of one rank at a time. Once it is used, pytest captures nothing until the next test."""

    def __init__(self, config: pytest.Config) -> None:
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._rank: int | None = None

    def show(self, rank: int, text: str) -> None:
        self._turn_to(rank)
        print(text, end="", flush=True)

    def read(self, rank: int) -> str:
        """A line of the user's; empty at the end of the input."""
        self._turn_to(rank)
        return sys.stdin.readline()

    def release(self) -> None:
        """A test has ended."""
        self._rank = None

    def _turn_to(self, rank: int) -> None:
        if self._capture is not None:
            self._capture.suspend_global_capture(in_=True)
        if rank != self._rank:
            self._rank = rank
            print(f"\n>>> rank {rank} is in its debugger, and others may wait for it; c goes on", flush=True)
