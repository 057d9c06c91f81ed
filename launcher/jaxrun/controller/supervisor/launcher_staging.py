"""The launcher's part in --stage: copies directories to this host, and sends them to some other hosts."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

import jaxrun
from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.listener import Peer
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.directory_copy import copy_directory, list_directory
from jaxrun.node.staging.transfer import pass_on
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.staging_messages import STAGE_VENV, Stage, StagedContent, staged_path, use_copies
from jaxrun.protocol.worker_command import runtime_directory
from jaxrun.spec.engines.ssh import carries_environment
from jaxrun.spec.job.job import Job
from jaxrun.terminal import print_notice


class Staged(Struct, frozen=True):
    """The staged directories, and this host's copies of them, which stay in use until this process ends."""

    stage: Stage
    copies: Copies

    def start_from_copies(self, setup: WorkerSetup) -> WorkerSetup:
        """Return the setup of workers of this host with copies in place of their sources."""
        argv, variables = use_copies(setup.argv, setup.environ, self.copies.by_source(self.stage))
        return replace(setup, argv=argv, environ={**setup.environ, **variables})

    def give(self, peer: Peer) -> None:
        """Send a host the copies that it lacks, in a thread; that host reports problems."""

        def pass_all() -> None:
            with suppress(OSError, ProtocolError), peer.connection:
                taker = BlockingConnection(peer.connection, peer.tags, f"agent {peer.number}")
                pass_on(self.stage.contents, self.copies, None, [taker])

        threading.Thread(target=pass_all, name="jaxrun-stage", daemon=True).start()


def stage_directories(job: Job) -> Staged:
    """Copy the directories of --stage, unless the copies exist.

    Raises UsageError if a directory does not exist, UnavailableError if it cannot be copied.
    """
    base = os.path.abspath(job.stage_dir) if job.stage_dir else ""
    sources = [_resolve(named) for named in job.stage]
    try:
        copies = Copies(base)
        staged = Staged(Stage(base, tuple(_stage(copies, source) for source in sources)), copies)
    except (OSError, UnavailableError) as error:
        raise UnavailableError(f"--stage on {os.uname().nodename}: {error}") from None
    own = _brought_by_ssh() if carries_environment(job) else ()
    _show_what_stays(copies.by_source(staged.stage), own)
    return staged


def _resolve(named: Path) -> str:
    """Return the absolute path of a directory given with --stage."""
    is_venv = str(named) == STAGE_VENV
    source = sys.prefix if is_venv else os.path.abspath(named)
    if is_venv and source == sys.base_prefix:
        none = f"--stage {STAGE_VENV}, but jaxrun runs in no virtual environment"
        raise UsageError(f"{none}; give a directory: --stage {source}")
    if not os.path.isdir(source) or source == "/":
        raise UsageError(f"--stage {named}: {source} is not a directory that can be copied")
    return source


def _brought_by_ssh() -> tuple[str, ...]:
    """The directories that hosts need not have if the ssh backend carries jaxrun: its own, and Python's."""
    return os.path.dirname(os.path.dirname(jaxrun.__file__)), os.path.dirname(runtime_directory()), sys.base_prefix


def _show_what_stays(staged: dict[str, str], brought: tuple[str, ...]) -> None:
    """Print which parts of Python's path are not in the copies: editable installs, and Python itself.

    `brought` are directories that come in another way.
    """
    if staged_path(sys.executable, staged) == sys.executable:
        return
    mappings = [vars(module).get("MAPPING", {}) for name, module in sys.modules.items() if "__editable__" in name]
    folders = dict.fromkeys([*sys.path, *chain.from_iterable(mapping.values() for mapping in mappings)])
    known = {**staged, **dict.fromkeys(brought, "")}
    if stays := [folder for folder in folders if os.path.isdir(folder) and staged_path(folder, known) == folder]:
        print_notice(f"not staged, and read where they are: {', '.join(stays)}")


def _stage(copies: Copies, source: str) -> StagedContent:
    """Make a copy of a directory, which is read only if its file system shows that it has changed."""
    listed, listing = list_directory(source)
    nbytes = sum(status.st_size for _, status in listed)
    name = copies.find_listing(listing)
    name = name or copies.add(nbytes, lambda draft: copy_directory(source, draft, listed), listing)
    return StagedContent(tuple(dict.fromkeys((source, os.path.realpath(source)))), name, nbytes)
