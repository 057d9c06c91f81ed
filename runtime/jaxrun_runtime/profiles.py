"""Gives each rank's JAX profile its own file names where several ranks share a host.

JAX names a profile's files by the host and the second in which the profile ends. Ranks of one host that take a profile
at the same time would write the same file, and would read each other's half-written files for Perfetto. So JAX writes
each profile into a separate directory, and the files are then moved to their place. The first rank of a host keeps
JAX's names, and the other ranks' names begin with "rank-0003-".
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrun.files.own_files import remove_directory
from jaxrun.protocol.env import WorkerEnv

_DRAFT = "jaxrun_draft"  # the attribute of a ProfileSession that holds its Draft


class Draft:
    """The directory into which JAX writes one profile before its files go to `log_dir`."""

    def __init__(self, log_dir: str, rank: int, prefix: str) -> None:
        os.makedirs(log_dir, exist_ok=True)
        self.log_dir = log_dir
        self.directory = tempfile.mkdtemp(prefix=f".rank-{rank:04d}-", dir=log_dir)
        self._prefix = prefix

    def publish(self) -> None:
        """Move the profile's files to their place, and remove the directory."""
        try:
            for file in Path(self.directory).rglob("*"):
                if file.is_file():
                    place = Path(self.log_dir, file.parent.relative_to(self.directory), self._prefix + file.name)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(place)
        finally:
            self.remove()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_directory(Path(self.directory))


def keep_apart(env: WorkerEnv) -> None:
    """From now on, write the profiles of the program's own jax.profiler.start_trace and trace by rank."""
    if env.local_size == 1:
        return
    import jax.profiler as profiler

    prefix = f"rank-{env.rank:04d}-" if env.local_rank else ""
    make_draft = functools.partial(_make_draft, rank=env.rank, prefix=prefix)
    if session := getattr(profiler, "ProfileSession", None):  # newer JAX, where all traces are sessions
        _replace_session_methods(session, make_draft)
    else:
        _replace_functions(profiler, make_draft)


def _make_draft(log_dir: Any, *, rank: int, prefix: str) -> Draft | None:
    """Return a draft of a profile for `log_dir`; None if it is not a directory of this host, or cannot be written."""
    if log_dir is None or "://" in os.fspath(log_dir):
        return None
    try:
        return Draft(os.fspath(log_dir), rank, prefix)
    except OSError:
        return None  # JAX has its own error for that


def _replace_session_methods(session: Any, make_draft: Any) -> None:
    start, stop = session.start, session.stop

    @functools.wraps(start)
    def start_session(self: Any) -> Any:
        log_dir = self.log_dir
        draft = make_draft(log_dir)
        if draft is None:
            return start(self)
        self.log_dir = draft.directory
        try:
            started = start(self)
        except BaseException:
            self.log_dir = log_dir
            draft.remove()
            raise
        setattr(self, _DRAFT, draft)
        return started

    @functools.wraps(stop)
    def stop_session(self: Any) -> Any:
        try:
            return stop(self)
        finally:
            draft: Draft | None = self.__dict__.pop(_DRAFT, None)
            if draft is not None:
                self.log_dir = draft.log_dir
                draft.publish()

    session.start, session.stop = start_session, stop_session


def _replace_functions(profiler: Any, make_draft: Any) -> None:
    start, stop = profiler.start_trace, profiler.stop_trace
    drafts: list[Draft] = []  # at most one: JAX takes one profile at a time

    @functools.wraps(start)
    def start_trace(log_dir: Any, *args: Any, **kwargs: Any) -> None:
        draft = make_draft(log_dir)
        try:
            start(draft.directory if draft else log_dir, *args, **kwargs)
        except BaseException:
            if draft:
                draft.remove()
            raise
        drafts[:] = [draft] if draft else []

    @functools.wraps(stop)
    def stop_trace() -> None:
        try:
            stop()
        finally:
            while drafts:
                drafts.pop().publish()

    @contextlib.contextmanager
    @functools.wraps(profiler.trace)
    def trace(log_dir: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        start_trace(log_dir, *args, **kwargs)
        try:
            yield
        finally:
            stop_trace()

    profiler.start_trace, profiler.stop_trace, profiler.trace = start_trace, stop_trace, trace
