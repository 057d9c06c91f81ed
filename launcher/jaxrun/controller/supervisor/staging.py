"""The launcher's part in --stage: reads each directory once, to a copy on this host, which agents take from here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.node.staging.content import Entry, copy_files, list_directory, name_of
from jaxrun.node.staging.copies import Copies, Copy
from jaxrun.node.staging.host import describe
from jaxrun.node.staging.transfer import Supply
from jaxrun.protocol.stage_messages import Stage, StagedContent, staged_path
from jaxrun.spec.job.job import Job
from jaxrun.terminal import print_notice
from jaxrun.text import format_bytes

_ENVIRONMENT = "venv"  # as a name: the environment in which jaxrun runs
_NOTICE_INTERVAL_S = 10.0  # between two lines about how much has been read
_FIRST_NOTICE_S = 2.0


@dataclass(frozen=True, slots=True)
class Staged:
    """What is staged, where it is on this host, by source, and what gives it to others."""

    stage: Stage
    paths: dict[str, str]
    supply: Supply


def stage_directories(job: Job) -> Staged:
    """Copy what --stage names, unless the copies are there. They stay in use until this process ends.

    Raises UsageError if a directory is not there, UnavailableError if it cannot be copied.
    """
    paths: dict[str, str] = {}
    contents, supply = [], Supply()
    base = os.path.abspath(job.stage_dir) if job.stage_dir else ""
    try:
        with closing(Copies(base)) as copies:
            for named in job.stage:
                source = _resolve(named)
                name, copy = _copy(copies, source)
                nbytes = sum(entry.size for entry in copy.entries)
                supply.add(name, nbytes, lambda copy=copy: copy)  # type: ignore[misc]
                sources = tuple(dict.fromkeys((source, os.path.realpath(source))))
                contents.append(StagedContent(sources, name, nbytes))
                paths |= dict.fromkeys(sources, copy.path)
    except (OSError, UnavailableError) as error:
        raise UnavailableError(f"--stage on {os.uname().nodename}: {describe(error)}") from None
    for note in _notes(paths):
        print_notice(note)
    return Staged(Stage(base, tuple(contents)), paths, supply)


def _resolve(named: Path) -> str:
    """The absolute path of what --stage names."""
    source = os.path.abspath(named)
    if str(named) == _ENVIRONMENT:
        if sys.prefix == sys.base_prefix:
            none = f"--stage {_ENVIRONMENT}, but jaxrun runs in no virtual environment"
            raise UsageError(f"{none}; give a directory: --stage {sys.prefix}")
        source = sys.prefix
    if not os.path.isdir(source) or source == "/":
        raise UsageError(f"--stage {named}: {source} is no directory that can be copied")
    return source


def _copy(copies: Copies, source: str) -> tuple[str, Copy]:
    """The name and the copy of a directory, which is read only if its file system says that it has changed."""
    entries, seen = list_directory(source)
    if found := copies.find_source(seen):
        return found
    all_bytes, done, started = sum(entry.size for entry in entries), 0, time.monotonic()
    next_notice = started + _FIRST_NOTICE_S

    def show(entry: Entry) -> None:
        nonlocal done, next_notice
        done += entry.size
        if time.monotonic() >= next_notice:
            next_notice = time.monotonic() + _NOTICE_INTERVAL_S
            print_notice(f"reading {source}: {format_bytes(done)} of {format_bytes(all_bytes)}")

    with copies.begin(entries) as draft:
        entries = copy_files(source, draft.path, entries, show)
        name = name_of(entries)
        copy = copies.finish(draft, name, entries)
    copy.note_source(seen)
    seconds = time.monotonic() - started
    print_notice(f"read {source} once: {format_bytes(all_bytes)} in {seconds:.1f} s, to {copy.path}")
    return name, copy


def _notes(paths: dict[str, str]) -> Sequence[str]:
    """What of the environment stays where it is."""
    if staged_path(sys.executable, paths) == sys.executable:
        return ()
    notes = []
    folders = [Path(folder) for folder in sys.path if staged_path(folder, paths) != folder]
    lines = [line for folder in folders for file in folder.glob("*.pth") for line in file.read_text().split("\n")]
    editable = {line for line in lines if line.startswith("/") and staged_path(line, paths) == line}
    editable |= {file.name for folder in folders for file in folder.glob("__editable___*_finder.py")}
    if editable:
        notes.append(f"editable installs stay where they are: {', '.join(sorted(editable))}")
    if os.stat(sys.base_prefix).st_dev == os.stat(sys.prefix).st_dev and sys.base_prefix != sys.prefix:
        notes.append(f"Python itself, with its standard library, stays where it is: {sys.base_prefix}")
    return notes
