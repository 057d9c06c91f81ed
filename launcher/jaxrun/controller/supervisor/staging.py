"""The launcher's part in --stage: copies directories of a slow file system to this host, and gives them to some others.

Many files are read at a time, as opening them takes longest. Sockets, devices, .git and run directories are left out.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.node.channel.listener import Peer
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.transfer import name_copy, pass_on
from jaxrun.protocol.gang_connection import BlockingConnection
from jaxrun.protocol.staging import Stage, StagedContent, staged_path, use_copies
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice
from jaxrun.text import format_bytes

_ENVIRONMENT = "venv"  # as a name: the environment in which jaxrun runs
_NOTICE_INTERVAL_S = 5.0  # between two lines about how much has been read
_THREADS = 16
_PIECE_BYTES = 2**20
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
_LEFT_OUT = (".git", "jaxrun-runs")
Listed = tuple[str, os.stat_result]  # a path, and what its file system says of it


@dataclass(frozen=True, slots=True)
class Staged:
    """What is staged, and this host's copies of it, which stay in use until this process ends."""

    stage: Stage
    copies: Copies

    def give(self, peer: Peer) -> None:
        """Give a host what it lacks, in a thread; that host reports what goes wrong."""

        def pass_all() -> None:
            with suppress(OSError, ProtocolError), peer.connection:
                taker = BlockingConnection(peer.connection, peer.tags, f"rank {peer.rank}")
                pass_on(self.stage.contents, self.copies, None, [taker])

        threading.Thread(target=pass_all, name="jaxrun-stage", daemon=True).start()


def stage_here(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """The plan of workers that start from this host's copies. Raises what stage_directories raises."""
    found = stage_directories(plan.job)
    argv, variables = use_copies(plan.argv, plan.base_env(environ), found.copies.by_source(found.stage))
    return replace(plan, argv=argv, set_env={**plan.set_env, **variables})


def stage_directories(job: Job) -> Staged:
    """Copy what --stage names, unless the copies are there.

    Raises UsageError if a directory is not there, UnavailableError if it cannot be copied.
    """
    base = os.path.abspath(job.stage_dir) if job.stage_dir else ""
    sources = [_resolve(named) for named in job.stage]
    try:
        copies = Copies(base)
        staged = Staged(Stage(base, tuple(_stage(copies, source) for source in sources)), copies)
    except (OSError, UnavailableError) as error:
        raise UnavailableError(f"--stage on {os.uname().nodename}: {error}") from None
    _show_what_stays(copies.by_source(staged.stage))
    return staged


def _resolve(named: Path) -> str:
    """The absolute path of what --stage names."""
    is_venv = str(named) == _ENVIRONMENT
    source = sys.prefix if is_venv else os.path.abspath(named)
    if is_venv and source == sys.base_prefix:
        none = f"--stage {_ENVIRONMENT}, but jaxrun runs in no virtual environment"
        raise UsageError(f"{none}; give a directory: --stage {source}")
    if not os.path.isdir(source) or source == "/":
        raise UsageError(f"--stage {named}: {source} is no directory that can be copied")
    return source


def _show_what_stays(staged: dict[str, str]) -> None:
    """Say what of Python's path is not in the copies: editable installs, and Python itself."""
    if staged_path(sys.executable, staged) == sys.executable:
        return
    mappings = [vars(module).get("MAPPING", {}) for name, module in sys.modules.items() if "__editable__" in name]
    folders = dict.fromkeys([*sys.path, *chain.from_iterable(mapping.values() for mapping in mappings)])
    if stays := [folder for folder in folders if os.path.isdir(folder) and staged_path(folder, staged) == folder]:
        print_notice(f"not staged, and read where they are: {', '.join(stays)}")


# ---- reading


def _stage(copies: Copies, source: str) -> StagedContent:
    """Have a copy of a directory, which is read only if its file system says that it has changed."""
    listed, listing = list_directory(source)
    nbytes = sum(status.st_size for _, status in listed)
    name = copies.find_listing(listing)
    name = name or copies.add(nbytes, lambda draft: copy_directory(source, draft, listed), listing)
    return StagedContent(tuple(dict.fromkeys((source, os.path.realpath(source)))), name, nbytes)


def list_directory(source: str) -> tuple[list[Listed], str]:
    """Return all that is in a directory, and a hash of that: where it is the same, so are the files. Raises OSError."""
    found, folders = list[Listed](), [""]
    with ThreadPoolExecutor(_THREADS) as pool:
        while folders:
            level = [*chain.from_iterable(pool.map(partial(_list_folder, source), folders))]
            folders = [path for path, status in level if stat.S_ISDIR(status.st_mode)]
            found += level
    found.sort()
    seen = [(path, one.st_mode, one.st_ino, one.st_size, one.st_mtime_ns) for path, one in found]
    return found, hashlib.sha256(ascii([source, seen]).encode()).hexdigest()


def _list_folder(source: str, folder: str) -> list[Listed]:
    with os.scandir(os.path.join(source, folder)) as there:
        names = [one for one in there if one.name not in _LEFT_OUT]
        listed = [(os.path.join(folder, one.name), one.stat(follow_symlinks=False)) for one in names]
    return [one for one in listed if stat.S_IFMT(one[1].st_mode) in _KINDS]


def copy_directory(source: str, draft: str, listed: list[Listed]) -> str:
    """Copy what is listed to a draft of a copy, and return the name of the copy.

    Raises OSError, and UnavailableError that names a file which changes meanwhile.
    """
    started = shown_at = time.monotonic()
    nbytes, done, is_over = sum(status.st_size for _, status in listed), 0, threading.Event()
    os.mkdir(f"{draft}/copy")
    for folder in (path for path, status in listed if stat.S_ISDIR(status.st_mode)):
        os.mkdir(f"{draft}/copy/{folder}")
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for size in pool.map(lambda one: _copy_file(source, f"{draft}/copy", one, is_over), listed):
                done += size
                if time.monotonic() > shown_at + _NOTICE_INTERVAL_S:
                    shown_at = time.monotonic()
                    print_notice(f"reading {source}: {format_bytes(done)} of {format_bytes(nbytes)}")
        finally:  # a Ctrl-C waits for no large file
            is_over.set()
    name = name_copy(draft, [path for path, _ in listed])
    took, path = time.monotonic() - started, f"{os.path.dirname(draft)}/{name}"
    print_notice(f"read {source} once: {format_bytes(nbytes)} in {took:.1f} s, to {path}")
    return name


def _copy_file(source: str, copy: str, one: Listed, is_over: threading.Event) -> int:
    """Copy a file or a symbolic link; return how many bytes it has."""
    path, copied, listed = f"{source}/{one[0]}", f"{copy}/{one[0]}", one[1]
    if stat.S_ISLNK(listed.st_mode):
        os.symlink(os.readlink(path), copied)
    if not stat.S_ISREG(listed.st_mode):
        return listed.st_size
    try:
        with open(path, "rb") as file, open(copied, "xb") as new:
            while not is_over.is_set() and os.sendfile(new.fileno(), file.fileno(), None, _PIECE_BYTES):
                pass
            status, nbytes = os.fstat(file.fileno()), os.fstat(new.fileno()).st_size
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{path} to {copied}") from None
    if (status.st_ino, status.st_mtime_ns, nbytes) != (listed.st_ino, listed.st_mtime_ns, listed.st_size):
        raise UnavailableError(f"{path} has changed while it was read; start again once nobody writes to it")
    os.chmod(copied, stat.S_IMODE(listed.st_mode))
    os.utime(copied, ns=(listed.st_mtime_ns, listed.st_mtime_ns))
    return nbytes
