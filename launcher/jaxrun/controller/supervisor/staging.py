"""The launcher's part in --stage: reads each directory once, to a copy on this host, and gives it to some others."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.node.channel.listener import Peer
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.source import copy_directory, list_directory
from jaxrun.node.staging.transfer import name_copy, pass_on
from jaxrun.protocol.gang_connection import BlockingConnection
from jaxrun.protocol.stage_messages import Stage, StagedContent
from jaxrun.protocol.staged_paths import staged_path, use_copies
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice
from jaxrun.text import format_bytes

_ENVIRONMENT = "venv"  # as a name: the environment in which jaxrun runs
_NOTICE_INTERVAL_S = 5.0  # between two lines about how much has been read


@dataclass(frozen=True, slots=True)
class Staged:
    """What is staged, and this host's copies of it."""

    stage: Stage
    copies: Copies

    def give(self, peer: Peer) -> None:
        """Give a host what it lacks, in a thread; that host reports what goes wrong."""

        def pass_all() -> None:
            with suppress(OSError, ProtocolError), peer.connection:
                taker = BlockingConnection(peer.connection, peer.tags, f"rank {peer.rank}")
                pass_on(self.stage.contents, self.copies, None, [taker])

        threading.Thread(target=pass_all, name="jaxrun-stage", daemon=True).start()


def stage_directories(job: Job) -> Staged:
    """Copy what --stage names, unless the copies are there. They stay in use until this process ends.

    Raises UsageError if a directory is not there, UnavailableError if it cannot be copied.
    """
    base = os.path.abspath(job.stage_dir) if job.stage_dir else ""
    sources = [_resolve(named) for named in job.stage]
    try:
        copies = Copies(base)
        staged = Staged(Stage(base, tuple(_copy(copies, source) for source in sources)), copies)
    except (OSError, UnavailableError) as error:
        raise UnavailableError(f"--stage on {os.uname().nodename}: {error}") from None
    _show_what_stays(copies.by_source(staged.stage))
    return staged


def stage_here(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """The plan of workers that start from this host's copies."""
    found = stage_directories(plan.job)
    argv, variables = use_copies(plan.argv, plan.base_env(environ), found.copies.by_source(found.stage))
    return replace(plan, argv=argv, set_env={**plan.set_env, **variables})


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


def _copy(copies: Copies, source: str) -> StagedContent:
    """Copy a directory, which is read only if its file system says that it has changed."""
    listed, seen = list_directory(source)
    started, nbytes = time.monotonic(), sum(status.st_size for _, status in listed)

    def read(draft: str) -> str:
        done, shown_at = 0, started
        for size in copy_directory(source, f"{draft}/copy", listed):
            done += size
            if time.monotonic() > shown_at + _NOTICE_INTERVAL_S:
                shown_at = time.monotonic()
                print_notice(f"reading {source}: {format_bytes(done)} of {format_bytes(nbytes)}")
        name = name_copy(draft, [path for path, _ in listed])
        took = time.monotonic() - started
        print_notice(f"read {source} once: {format_bytes(nbytes)} in {took:.1f} s, to {copies.path}/{name}")
        return name

    name = copies.find_read(seen) or copies.add(nbytes, read, seen)
    return StagedContent(tuple(dict.fromkeys((source, os.path.realpath(source)))), name, nbytes)


def _show_what_stays(staged: dict[str, str]) -> None:
    """Say what of Python's path is not in the copies: editable installs, and Python itself."""
    if staged_path(sys.executable, staged) == sys.executable:
        return
    mappings = [vars(module).get("MAPPING", {}) for name, module in sys.modules.items() if "__editable__" in name]
    folders = [*sys.path, *(folder for mapping in mappings for folder in mapping.values())]
    stays = [folder for folder in folders if os.path.isdir(folder) and staged_path(folder, staged) == folder]
    if stays:
        print_notice(f"not staged, and read where they are: {', '.join(dict.fromkeys(stays))}")
