"""Writes how a job ended to the file that Kubernetes reads when a pod ends: `kubectl describe pod` shows it.

Source: https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jaxrun.protocol.names import POD_MARKER
from jaxrun.terminal import print_notice

DEFAULT_PATH = Path("/dev/termination-log")  # Kubernetes makes it in every container
_MAX_BYTES = 4096  # Kubernetes reads no more


def write_termination_log(given: Path | None, text: str, environ: Mapping[str, str]) -> None:
    """Write `text` to `given` (--termination-log), or in a pod to its usual file; it is cut after 4,096 bytes.

    A file that cannot be written is named on the terminal if it was given.
    """
    path = given or (DEFAULT_PATH if environ.get(POD_MARKER) and DEFAULT_PATH.is_file() else None)
    if path is None or not text:
        return
    try:
        with open(path, "wb", opener=_open_existing_or_new) as file:
            file.write(text.encode(errors="replace")[:_MAX_BYTES].decode(errors="ignore").encode())
    except OSError as error:
        if given is not None:
            print_notice(f"--termination-log {given} could not be written: {error.strerror}")


def _open_existing_or_new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o644)  # no FIFO is waited for
