"""The ways in which a rank can fail, and the note that it leaves of when it did."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def commit(kind: str) -> None:
    """Note the time in BENCH_DIR/fault, whole or not at all, then fail."""
    note = Path(os.environ["BENCH_DIR"], "fault")
    note.with_suffix(".new").write_text(repr(time.time()))
    note.with_suffix(".new").rename(note)
    match kind:
        case "raise":
            raise ValueError("this rank was told to fail")
        case "sys.exit(7)":
            sys.exit(7)
        case "os._exit(7)":
            os._exit(7)
        case "hang":
            time.sleep(100_000)
        case "mismatch":
            return  # the caller then makes another cross-process call than the other ranks
        case "SIGKILL" | "SIGSEGV":
            os.kill(os.getpid(), signal.Signals[kind])
        case _:
            raise SystemExit(f"no fault is called {kind!r}")
