"""The jobs whose run directories lie in one place: what became of each, and which of them may be deleted."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.verdict.goodput_text import Goodput
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import UsageError
from jaxrun.files.own_files import is_trusted, open_own_directory, open_own_or_linked_directory, remove_directory
from jaxrun.records.rundir.job_numbers import read_numbers, remove_unused
from jaxrun.records.rundir.recorded_files import find_collection, is_run_dir, read_plan, read_verdict
from jaxrun.records.rundir.rundir import (
    COLLECTION_DIR,
    EVENTS_FILE,
    INCOMPLETE_FILE,
    JOB_FILE,
    LATEST_LINK,
    VERDICT_FILE,
)
from jaxrun.terminal import in_one_line
from jaxrun.text import format_bytes, format_columns, format_seconds, format_user, plural

_STARTING_S = 600.0  # a job that has not said yet who runs it may be starting
_SHOWN_CHARS = 40  # of a command
_SHOWN_OBSTACLES = 5
_WHY_CHARS, _MIN_WHY_CHARS = 80, 20  # of why a job failed, in a file and on a terminal that is full


class RecordedJob(Struct, frozen=True):
    """A job as its run directory shows it.

    started:  seconds since the epoch
    command:  the program and its arguments
    host:     where its launcher runs, or ran; empty if nothing says so
    verdict:  None while it runs, and where the launcher was killed
    running:  None if only `host` knows
    is_complete:  whether its launcher could write all records
    tag:      the note of --tag
    number:   as commands take it; None where the file system has no links
    """

    path: Path
    started: float
    command: tuple[str, ...] = ()
    processes: int = 0
    host: str = ""
    verdict: Verdict | None = None
    running: bool | None = False
    is_complete: bool = True
    tag: str = ""
    number: int | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took; None if nothing says so."""
        if self.verdict is None:
            return time.time() - self.started if self.running else None
        return self.verdict.seconds

    @property
    def goodput(self) -> Goodput | None:
        """What its time was worth; None while it runs, for a short job, and if no steps were seen."""
        found = self.verdict.goodput if self.verdict is not None else None
        return found if found is not None and found.is_known else None

    @property
    def state(self) -> str:
        """How it went, in a few words."""
        if self.verdict is not None:
            restarts = f" after {plural(len(self.verdict.earlier), 'restart')}" if self.verdict.earlier else ""
            ended = "done" if self.verdict.is_ok else f"{self.verdict.outcome}, exit {self.verdict.exit_code}"
            return f"{ended}{restarts}"
        if self.running is None:
            return f"running, or killed, on {self.host}"
        if self.running:
            return "running"
        return "killed with its launcher" if self.is_complete else "unknown: the disk was full, or not writable"

    @property
    def why(self) -> str:
        """What happened, in one line; empty if all went well, and while it runs."""
        if self.verdict is None or self.verdict.is_ok:
            return ""
        return in_one_line(self.verdict.headline)


def list_jobs(path: Path | None) -> tuple[Path, list[RecordedJob]]:
    """Return the directory that `path` means, by default the working directory's, and its jobs, the oldest first.

    Raises UsageError if there is none.
    """
    if path is None or is_run_dir(path):
        collection = find_collection() if path is None else path.resolve().parent
    else:
        collection = path / COLLECTION_DIR if (path / COLLECTION_DIR).is_dir() else path
    if is_run_dir(collection):  # the working directory is one
        collection = collection.resolve().parent
    try:
        entries = [entry for entry in collection.iterdir() if not entry.is_symlink() and is_run_dir(entry)]
    except OSError as error:
        raise UsageError(f"cannot read {collection}: {error.strerror}") from None
    numbers = read_numbers(collection)
    found = [replace(read_job(entry), number=numbers.get(entry.name)) for entry in entries]
    return collection, sorted(found, key=lambda job: (job.started, job.path.name))


def find_collection_to_clean(path: Path | None) -> tuple[Path, list[RecordedJob]]:
    """Do the same as `list_jobs`; raises UsageError, too, if `path` is not a directory of run directories."""
    if path is not None and is_run_dir(path):
        above = path.resolve().parent
        raise UsageError(
            f"{path} is one run directory; name the directory that holds them: jaxrun clean --keep N {above}"
        )
    collection, found = list_jobs(path)
    if not found and not _is_collection(collection):
        raise UsageError(f"{collection} holds no run directory of jaxrun; nothing was deleted")
    return collection, found


def _is_collection(path: Path) -> bool:
    """Whether the directory is empty, or jaxrun has made it."""
    return path.name == COLLECTION_DIR or not any(path.iterdir())


def find_job(word: str) -> Path | None:
    """Return the run directory of the job with this number or name in the working directory's collection.

    None if a path `word` exists, or it is a path of several parts. Raises UsageError if there is no such job.
    """
    if os.path.lexists(word) or not word or os.path.basename(word) != word:
        return None
    try:
        collection = find_collection()
    except UsageError:
        if word.isdecimal():
            raise
        return None
    if is_run_dir(collection):  # the working directory is one
        collection = collection.resolve().parent
    found = next((name for name, number in read_numbers(collection).items() if str(number) == word), word)
    path = collection / found
    if is_run_dir(path):
        return path
    raise UsageError(f"there is no job {word} in {collection}; jaxrun list shows the jobs")


def read_job(path: Path) -> RecordedJob:
    """Read what the run directory `path` says; what it does not say stays empty."""
    recorded, found, started = read_plan(path), read_verdict(path), _started(path)
    host, pid = recorded.launcher.host, recorded.launcher.pid
    running: bool | None = False
    if not (path / VERDICT_FILE).exists():
        if host and host != os.uname().nodename:
            running = None
        elif pid:
            running = has_open(pid, path / EVENTS_FILE)
        else:
            running = time.time() - started < _STARTING_S
    is_complete = not os.path.lexists(path / INCOMPLETE_FILE)
    return RecordedJob(
        path, started, recorded.program, recorded.processes, host, found, running, is_complete, recorded.tag
    )


def format_jobs(jobs: Sequence[RecordedJob], width: int | None = None) -> str:
    """Lay the jobs out as a table, with the numbers that commands take; `width`: of the terminal, if it is one."""
    rows = [["job", "run directory", "started", "took", "processes", "how it went", "program"]]
    for job in jobs:
        command = in_one_line(" ".join(job.command))
        rows.append(
            [
                "" if job.number is None else str(job.number),
                in_one_line(job.path.name),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started)),
                "" if job.seconds is None else format_seconds(job.seconds),
                str(job.processes or ""),
                in_one_line(job.state),
                _clip(command, _SHOWN_CHARS),
            ]
        )
    if any(job.goodput for job in jobs):
        shares = (f"{job.goodput.share:.1%}" if job.goodput is not None else "" for job in jobs)
        for row, share in zip(rows, ["goodput", *shares], strict=True):
            row.insert(-1, share)
    if any(job.tag for job in jobs):
        for row, tag in zip(rows, ["tag", *(in_one_line(job.tag) for job in jobs)], strict=True):
            row.insert(-1, tag)
    if any(job.why for job in jobs):
        used = max(map(len, format_columns(rows))) + 2
        most = _WHY_CHARS if width is None else max(_MIN_WHY_CHARS, width - used)
        for row, why in zip(rows, ["why", *(_clip(job.why, most) for job in jobs)], strict=True):
            row.append(why)
    return "\n".join(format_columns(rows))


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


class Cleaned(Struct, frozen=True):
    """What `clean` has done with the run directories in one place.

    deleted:  which are deleted, or, with `dry_run`, would be
    failed:   which could not be deleted, and why
    kept:     which are in use, or may be, and by whom
    size:     bytes of all that were to be deleted
    count:    how many run directories there were
    """

    directory: Path
    dry_run: bool
    deleted: tuple[Path, ...]
    failed: Mapping[Path, str]
    kept: Mapping[Path, str]
    size: int
    count: int


def clean(collection: Path, jobs: Sequence[RecordedJob], keep: int, *, dry_run: bool) -> Cleaned:
    """Delete the run directories of `jobs`, the oldest first, except the newest `keep` and those in use.

    Raises UsageError, before anything is deleted, if some of it is another user's, or cannot be deleted as a whole.
    """
    try:
        directory = open_own_or_linked_directory(collection)
    except OSError as error:
        raise UsageError(f"{collection} is not yours to clean: {error.strerror}") from None
    try:
        return _clean(collection, directory, jobs, keep, dry_run=dry_run)
    finally:
        os.close(directory)


def _clean(collection: Path, directory: int, jobs: Sequence[RecordedJob], keep: int, *, dry_run: bool) -> Cleaned:
    """`directory` is a descriptor of the collection, which no other user can replace."""
    kept = {job.path: use for job in jobs if (use := _use_of(job))}
    over = [job for job in jobs if job.path not in kept]
    chosen = over[: max(0, len(over) - keep)]
    size = _check_all(directory, chosen)
    deleted, failed = list[Path](), dict[Path, str]()
    for job in chosen:
        try:
            if not dry_run:
                remove_directory(job.path.name, directory, private=False)
            deleted.append(job.path)
        except OSError as error:
            failed[job.path] = str(error.strerror)
    latest = collection / LATEST_LINK
    if latest.is_symlink() and not latest.exists():
        with contextlib.suppress(OSError):
            os.unlink(LATEST_LINK, dir_fd=directory)
    if not dry_run:
        remove_unused(directory)
    return Cleaned(collection, dry_run, tuple(deleted), failed, kept, size, len(jobs))


def _use_of(job: RecordedJob) -> str:
    """Who uses the run directory, or may: the job runs, or its launcher still delivers output; empty for nobody."""
    if job.running is not False:
        return job.state
    launcher = read_plan(job.path).launcher
    if launcher.host == os.uname().nodename and has_open(launcher.pid, job.path / EVENTS_FILE):
        return f"{job.state}, and its launcher (process {launcher.pid}) has not ended yet"
    return ""


def _check_all(directory: int, jobs: Sequence[RecordedJob]) -> int:
    """Return the size of these run directories in bytes. Raises UsageError if some of them cannot be deleted."""
    total, obstacles = 0, list[str]()
    for job in jobs:
        try:
            os.close(open_own_directory(job.path.name, directory))
            size, obstacle = _survey(job.path)
        except OSError as error:
            size, obstacle = 0, str(error.strerror)
        total += size
        obstacles += [f"{job.path}: {obstacle}"] if obstacle else []
    if obstacles:
        more = f"\nand {len(obstacles) - _SHOWN_OBSTACLES} more" if len(obstacles) > _SHOWN_OBSTACLES else ""
        shown = "\n".join(obstacles[:_SHOWN_OBSTACLES])
        raise UsageError(
            f"nothing was deleted, since not all of it can be; delete or move these first, or keep more:\n{shown}{more}"
        )
    return total


def format_cleaned(done: Cleaned) -> str:
    """What `jaxrun clean` prints."""
    lines = [f"would delete {path}" for path in done.deleted if done.dry_run]
    lines += [f"cannot delete {path}: {reason}" for path, reason in done.failed.items()]
    verb, directories = "would delete" if done.dry_run else "deleted", plural(done.count, "run directory")
    lines.append(f"{verb} {len(done.deleted)} of {directories} in {done.directory} ({format_bytes(done.size)})")
    lines += [f"kept {path}: {state}" for path, state in done.kept.items()]
    return "\n".join(lines)


def has_open(pid: int, file: Path) -> bool:
    """Whether the process has the file open: its number alone may belong to another process by now."""
    try:
        wanted = file.stat()
        return any(_same(f"/proc/{pid}/fd/{fd}", wanted) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _same(path: str, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), wanted)
    except OSError:
        return False


def _started(path: Path) -> float:
    """When the job started: it writes job.json then, and never again."""
    for name in (JOB_FILE, EVENTS_FILE, ""):
        with contextlib.suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


def _survey(path: Path) -> tuple[int, str]:
    """Return the bytes on the disk below `path`, and why not all of it can be deleted; empty if it can.

    Both as far as a path reaches: some may be nested deeper than one can say.
    """
    total, obstacle, folders = 0, "", [str(path)]
    while folders:  # os.walk of Python 3.11 calls itself
        folder = folders.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                total += status.st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    if not is_trusted(status.st_uid):
                        obstacle = obstacle or f"{entry.path} belongs to {format_user(status.st_uid)}"
                elif not os.access(folder, os.W_OK | os.X_OK):
                    obstacle = obstacle or f"{folder} is not writable for you"
    return total, obstacle
