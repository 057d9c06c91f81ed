"""What pytest captures of a rank lies in files with names, so that it can be read when the rank has died."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def redirect_capture(plugins: Any, path: str) -> tuple[str, str] | None:
    """Put files of our own in place of pytest's temporary ones; their names, or None if it captures no descriptors."""
    capture = getattr(plugins.get_plugin("capturemanager"), "_global_capturing", None)
    names = f"{path}.out", f"{path}.err"
    for name, stream in zip(names, ("out", "err"), strict=True):
        file = getattr(getattr(capture, stream, None), "tmpfile", None)
        try:
            descriptor = file.fileno() if file is not None else None
        except OSError:  # --capture=sys has none
            descriptor = None
        if descriptor is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        ours = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(ours, descriptor, inheritable=False)
        os.close(ours)
    return names
