"""The run directory: the place of a job's logs, event log and verdict; and how to find it again.

Until it is made, anything wrong with it is a UsageError. From then on no error of the file system is raised: a full
disk is reported once and costs files, never the job. All is made and written by the descriptors of directories
(own_files.py), so that no other user can have a job write elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.errors import UsageError
from jaxrun.files.own_files import (
    NEW_FILE,
    draft_name,
    open_own_directory,
    open_own_or_linked_directory,
    write_whole_file,
)
from jaxrun.records.event_log.event_log import LoggedEvent, format_header, format_line
from jaxrun.records.rundir import job_numbers

if TYPE_CHECKING:
    pass

COLLECTION_DIR = "jaxrun-runs"
LATEST_LINK = "latest"
EVENTS_FILE = "events.jsonl"
JOB_FILE = "job.json"
VERDICT_FILE = "verdict.json"
INCOMPLETE_FILE = "incomplete"  # empty; there if other files could not be written, as on a full disk
OLD_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAME_CHARACTERS = 60  # with any letters well below the 255 bytes that a file name may have


class RunDir:
    """The run directory of one job; if `path` is None, there is none, and every method does nothing.

    Errors that occur before `on_write_error` was called are kept for it.
    """

    def __init__(self, path: Path | None, descriptor: int = -1, *, events: int = NEW_FILE) -> None:
        """`descriptor`: of the directory `path`, which is opened without one; `events`: the flags by which events.jsonl
        is opened. Raises OSError."""
        self.path = path
        self._directory = descriptor
        self._events: int | None = None
        self._line_is_torn = False
        self._error_reported = False
        self._early_errors: list[str] = []
        self._warn: Callable[[str], None] = self._early_errors.append
        self._publish: Callable[[LoggedEvent, str], None] = lambda event, line: None
        if path is not None:
            if descriptor < 0:
                self._directory = open_own_directory(path)
            try:
                self._events = os.open(EVENTS_FILE, events | os.O_APPEND, 0o644, dir_fd=self._directory)
            except BaseException:
                os.close(self._directory)
                raise
            if events & os.O_CREAT:
                self._append(format_header())

    @property
    def name(self) -> str:
        """The absolute path; empty if there is none."""
        return str(self.path.absolute()) if self.path else ""

    @property
    def shown_path(self) -> Path | None:
        """The path as seen from the working directory, if it is below it."""
        if self.path is None or not self.path.is_absolute():
            return self.path
        try:
            here = Path.cwd()
        except FileNotFoundError:  # the program has deleted it
            return self.path
        return self.path.relative_to(here) if self.path.is_relative_to(here) else self.path

    def on_write_error(self, warn: Callable[[str], None]) -> None:
        """Call `warn` with a text, once, when the directory can no longer be written."""
        self._warn = warn
        for text in self._early_errors:
            warn(text)

    def on_event(self, publish: Callable[[LoggedEvent, str], None]) -> None:
        """Call `publish` with each event from now on and its line, without its end, once it is in the file."""
        self._publish = publish

    def record(self, event: LoggedEvent) -> None:
        """Write one line to events.jsonl at once, so that it outlives the launcher."""
        line = format_line(event)
        if self._events is not None:
            self._append(line)
        self._publish(event, line)

    def _append(self, line: str) -> None:
        assert self._events is not None
        # A line that a full disk has cut must not swallow the next one.
        encoded = ("\n" * self._line_is_torn + line + "\n").encode("utf-8", "backslashreplace")
        try:
            self._line_is_torn = os.write(self._events, encoded) < len(encoded)
        except OSError as error:
            self._line_is_torn = True
            self._report_error(error)

    def claim(self) -> bool:
        """Keep the directory for this process and its children until they end; returns False if another one has it.

        Returns True where the file system has no locks.
        """
        if self._events is not None:
            try:
                fcntl.flock(self._events, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                return True
        return True

    def write_text(self, name: str, text: str) -> None:
        """Write the file `name` as a whole or not at all."""
        if self._directory < 0:
            return
        try:
            write_whole_file(name, text.encode("utf-8", "backslashreplace"), 0o644, self._directory)
        except OSError as error:
            self._report_error(error)

    def remove(self, name: str) -> None:
        """Remove the file `name`, if it exists."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory)

    def make_attempt_directory(self, attempt: int) -> Path | None:
        """Make the directory of an attempt's logs; None if there is no run directory, or it cannot be made."""
        if self.path is None or self._directory < 0 or attempt == 1:
            return self.path
        folder = attempt_directory(self.path, attempt)
        try:
            os.mkdir(folder.name, dir_fd=self._directory)
        except FileExistsError:
            pass
        except OSError as error:
            self._report_error(error)
            return None
        return folder

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):
                os.close(self._events)
            os.close(self._directory)
            self._events, self._directory = None, -1

    def _report_error(self, error: OSError) -> None:
        if not self._error_reported:
            self._error_reported = True
            self._warn(f"cannot write to {self.path}: {error.strerror}; the job continues, its records are incomplete")
            with contextlib.suppress(OSError):  # an empty file needs no space on most disks
                os.close(os.open(INCOMPLETE_FILE, NEW_FILE, 0o644, dir_fd=self._directory))


def attempt_directory(run_dir: Path, attempt: int) -> Path:
    """Return the directory of an attempt's logs and flight recorders; the first attempt's is the run directory."""
    return run_dir if attempt == 1 else run_dir / f"attempt-{attempt}"


def create(request: Path | None, *, base: Path, name: str, now: datetime) -> RunDir:
    """Make the directory `request`, new or empty, or a new `base/jaxrun-runs/MMDD-HHMM-name`, linked as `latest`.

    Raises UsageError if `request` holds another job or anything else, or if the directory cannot be made or written,
    is a link (but `jaxrun-runs` may be one of this user's own), or belongs to another user.
    """
    if request is not None:
        return _use_existing(request)
    parent = base / COLLECTION_DIR
    wanted = f"{now:%m%d-%H%M}-{to_file_name(name)}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            parent.mkdir()
        collection = open_own_or_linked_directory(parent)
        try:
            _hide_from_git(collection)
            made = _make_new(collection, wanted)
            directory = RunDir(parent / made, open_own_directory(made, collection))
            _point_latest(collection, made)
            job_numbers.assign(collection, made)
        finally:
            os.close(collection)
    except OSError as error:
        raise unusable(parent, error) from None
    return directory


def to_file_name(name: str) -> str:
    """`name` as part of a file name: letters, digits, `.`, `_` and `-` of any language."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")[:_MAX_NAME_CHARACTERS] or "job"


def _use_existing(path: Path) -> RunDir:
    try:
        path.mkdir(parents=True, exist_ok=True)
        directory = open_own_directory(path)
        held = sorted(os.listdir(directory))
        if not held:
            return RunDir(path, directory)
        os.close(directory)
    except FileExistsError:
        if path.is_dir():  # another job has just made it
            raise UsageError(_describe_content(path, [EVENTS_FILE])) from None
        raise UsageError(f"--run-dir {path} is a file, not a directory. Name a new or an empty directory.") from None
    except OSError as error:
        raise unusable(path, error) from None
    raise UsageError(_describe_content(path, held))


def _describe_content(path: Path, held: list[str]) -> str:
    job = {EVENTS_FILE, JOB_FILE, VERDICT_FILE} & set(held)
    what = "another job" if job else ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
    see = f" (see it with: jaxrun explain {path})" if job else ""
    return f"--run-dir {path} is not empty: it holds {what}{see}. Name a new or an empty directory."


def _make_new(collection: int, wanted: str) -> str:
    number = 1
    while True:
        name = wanted if number == 1 else f"{wanted}-{number}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=collection)
            return name
        number += 1


def _hide_from_git(collection: int) -> None:
    """Keep the logs of jobs out of commits; an existing file is left alone."""
    with contextlib.suppress(OSError), open(os.open(".gitignore", NEW_FILE, 0o644, dir_fd=collection), "w") as file:
        file.write("*\n")


def _point_latest(collection: int, name: str) -> None:
    draft = draft_name()
    try:
        os.symlink(name, draft, dir_fd=collection)
        os.replace(draft, LATEST_LINK, src_dir_fd=collection, dst_dir_fd=collection)
    except OSError:  # a convenience, which some file systems lack
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=collection)


def unusable(path: Path, error: OSError) -> UsageError:
    """Return the error about a run directory that cannot be made or written."""
    return UsageError(
        f"cannot make the run directory {path}: {error.strerror}. "
        "Name another with --run-dir DIR, or do without it: --no-run-dir."
    )
