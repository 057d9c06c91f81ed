"""The run directory: where a job leaves its logs, event log and verdict; and how it is found again.

Until it is made, anything wrong with it is a UsageError. From then on no error of the file system is raised: a full
disk is reported once and costs files, never the job. All is made and written by the descriptors of directories
(own_directory.py), so that no other user can have a job write elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.job.program import working_directory
from jaxrun.rundir.own_directory import NEW_FILE, is_trusted, name_of_user, open_own_directory

COLLECTION_DIR = "jaxrun-runs"
LATEST_LINK = "latest"
EVENTS_FILE = "events.jsonl"
JOB_FILE = "job.json"
VERDICT_FILE = "verdict.json"
STACKS_FILE = "stacks.json"
_MAX_NAME_CHARACTERS = 60  # with any letters well below the 255 bytes that a file name may have


class RunDir:
    """The run directory of one job; with path None there is none, and every method does nothing.

    Errors that occur before `on_write_error` was called are kept for it.
    """

    def __init__(self, path: Path | None, descriptor: int = -1) -> None:
        """`descriptor`: of the directory `path`, which is opened without one. Raises OSError."""
        self.path = path
        self._directory = descriptor
        self._events: int | None = None
        self._line_is_torn = False
        self._error_reported = False
        self._early_errors: list[str] = []
        self._warn: Callable[[str], None] = self._early_errors.append
        if path is not None:
            if descriptor < 0:
                self._directory = open_own_directory(path)
            try:
                self._events = os.open(EVENTS_FILE, NEW_FILE | os.O_APPEND, 0o644, dir_fd=self._directory)
            except BaseException:
                os.close(self._directory)
                raise

    @property
    def name(self) -> str:
        """The absolute path; empty where there is none."""
        return str(self.path.absolute()) if self.path else ""

    @property
    def shown_path(self) -> Path | None:
        """The path as seen from the working directory, where it lies below it."""
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

    def record(self, event: str, time: float, rank: int | None = None, **data: object) -> None:
        """Write one line to events.jsonl at once, so that it outlives the launcher. `time`: seconds since the epoch."""
        if self._events is None:
            return
        of_rank = {} if rank is None else {"rank": rank}
        line = json.dumps({"time": round(time, 6), "event": event, **of_rank, **data}, ensure_ascii=False, default=str)
        # A line that a full disk has cut must not swallow the next one.
        encoded = ("\n" * self._line_is_torn + line + "\n").encode("utf-8", "backslashreplace")
        try:
            self._line_is_torn = os.write(self._events, encoded) < len(encoded)
        except OSError as error:
            self._line_is_torn = True
            self._report_error(error)

    def write_text(self, name: str, text: str) -> None:
        """Write the file `name` as a whole or not at all."""
        if self._directory < 0:
            return
        at, draft = self._directory, f".{name}.{os.getpid()}"
        try:
            with open(os.open(draft, NEW_FILE, 0o644, dir_fd=at), "wb") as file:
                file.write(text.encode("utf-8", "backslashreplace"))
            os.replace(draft, name, src_dir_fd=at, dst_dir_fd=at)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=at)
            self._report_error(error)

    def close(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):
                os.close(self._events)
            os.close(self._directory)
            self._events, self._directory = None, -1

    def _report_error(self, error: OSError) -> None:
        if not self._error_reported:
            self._error_reported = True
            self._warn(f"cannot write to {self.path}: {error.strerror}; the job goes on, its records are incomplete")


def create(request: Path | None, *, base: Path, name: str, now: datetime) -> RunDir:
    """Make the directory `request`, new or empty, or a new `base/jaxrun-runs/MMDD-HHMM-name`, linked as `latest`.

    Raises UsageError if `request` holds another job or anything else, or if the directory cannot be made or written,
    is a link, or belongs to another user.
    """
    if request is not None:
        return _use_existing(request)
    parent = base / COLLECTION_DIR
    wanted = f"{now:%m%d-%H%M}-{to_file_name(name)}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            parent.mkdir()
        collection = open_own_directory(parent)
        try:
            _hide_from_git(collection)
            made = _make_new(collection, wanted)
            directory = RunDir(parent / made, open_own_directory(made, collection))
            _point_latest(collection, made)
        finally:
            os.close(collection)
    except OSError as error:
        raise _unusable(parent, error) from None
    return directory


def find_run_dir(path: Path | None) -> Path:
    """The run directory that `path` means: itself, or the latest in it; with None the latest of the working directory.

    Raises UsageError if there is none.
    """
    path = path or find_collection()
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory. Give the run directory of a job, as {COLLECTION_DIR}/{LATEST_LINK}."
        )
    if path.name == LATEST_LINK:
        _check_latest(path)
    if is_run_dir(path):
        return path
    latest = path / LATEST_LINK
    _check_latest(latest)
    if is_run_dir(latest):
        # The link's own name says nothing about which job this is.
        return path / latest.resolve().name if latest.is_symlink() else latest
    jobs = sorted(entry for entry in path.iterdir() if entry.is_dir() and is_run_dir(entry))
    if jobs:
        return max(jobs, key=lambda job: job.stat().st_mtime)
    raise UsageError(
        f"{path} is not a run directory: it holds none of {JOB_FILE}, {EVENTS_FILE} and {VERDICT_FILE}, and no "
        f"directory that does. Give the run directory of a job, as {COLLECTION_DIR}/{LATEST_LINK}."
    )


def find_collection() -> Path:
    """The collection of run directories in the working directory, or that directory itself where it is one."""
    here = Path(working_directory())
    for path in (Path(COLLECTION_DIR), here):
        if path.is_dir() and (path.name == COLLECTION_DIR or is_run_dir(path)):
            return path
    raise UsageError(
        f"no job has left its run directory here: there is no {COLLECTION_DIR} in {here}. "
        "Name the run directory, or go to where the job was started."
    )


def is_run_dir(path: Path) -> bool:
    """Whether a job has left its files in `path`."""
    return any((path / name).is_file() for name in (JOB_FILE, EVENTS_FILE, VERDICT_FILE))


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
        raise _unusable(path, error) from None
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
    """Keep the logs of jobs out of commits; a file that is there already stays as it is."""
    with contextlib.suppress(OSError), open(os.open(".gitignore", NEW_FILE, 0o644, dir_fd=collection), "w") as file:
        file.write("*\n")


def _point_latest(collection: int, name: str) -> None:
    draft = f".{LATEST_LINK}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=collection)
        os.symlink(name, draft, dir_fd=collection)
        os.replace(draft, LATEST_LINK, src_dir_fd=collection, dst_dir_fd=collection)
    except OSError:  # a convenience, which some file systems lack
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=collection)


def _check_latest(latest: Path) -> None:
    """Raise UsageError where a link `latest` is another user's than that of the directory that it is in."""
    if not latest.is_symlink():
        return
    owner = latest.lstat().st_uid
    if owner != latest.parent.stat().st_uid and not is_trusted(owner):
        raise UsageError(
            f"{latest} belongs to {name_of_user(owner)}, who may lead it anywhere; name the run directory itself"
        )


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"cannot make the run directory {path}: {error.strerror}. "
        "Name another with --run-dir DIR, or do without it: --no-run-dir."
    )
