"""The directory with a testbed's files, and the lock that allows one process to change the testbed.

Everything else of a testbed is in its hosts' namespaces, which exist only as long as processes in them do. So a testbed
is gone once its processes have ended and this directory is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path("/run/jaxrun-testbed")
CONTROLLER = "ctl"
MAX_HOSTS = 99
# The path of a Unix socket may have 107 characters.
LONGEST_ROOT = 80
USAGE, UNAVAILABLE = 2, 69


class Refusal(Exception):
    """Raised for an expected failure, with what was wrong, what to do next, and the exit status."""

    def __init__(self, message: str, status: int = UNAVAILABLE) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Place:
    """The files of the testbed in the directory `root`."""

    root: Path

    def __post_init__(self) -> None:
        if not self.root.is_absolute() or len(str(self.root)) > LONGEST_ROOT or any(map(str.isspace, str(self.root))):
            raise Refusal(
                f"JAXRUN_TESTBED_DIR={str(self.root)!r} must be an absolute path without spaces "
                f"of at most {LONGEST_ROOT} characters",
                USAGE,
            )

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def grid_engine(self) -> Path:
        """Where everything of Grid Engine's is (SGE_ROOT); it does not exist until Grid Engine is started."""
        return self.root / "sge"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def ssh(self) -> Path:
        """Keys and configuration of OpenSSH's server and client."""
        return self.root / "ssh"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def commands(self) -> Path:
        """The directory that is first on the hosts' PATH; it has ssh."""
        return self.root / "bin"

    @property
    def record(self) -> Path:
        """Written when `up` has finished."""
        return self.root / "testbed.json"

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def hosts(self) -> int | None:
        """The number of hosts; None if no `up` has finished."""
        try:
            return int(json.loads(self.record.read_text())["hosts"])
        except FileNotFoundError:
            return None

    def finish(self, hosts: int) -> None:
        draft = self.record.with_suffix(".new")
        draft.write_text(json.dumps({"hosts": hosts}) + "\n")
        draft.replace(self.record)

    @property
    def stamp(self) -> Path:
        """The file that marks everything in the directory as the testbed's, which may be deleted."""
        return self.root / ".jaxrun-testbed"

    def claim(self) -> None:
        """Mark the directory as the testbed's. Raises Refusal if it has other files."""
        if not self.stamp.exists():
            if any(self.root.iterdir()):
                raise Refusal(f"{self.root} holds other files; let JAXRUN_TESTBED_DIR name a new directory", USAGE)
            self.stamp.touch()

    def clear(self) -> None:
        """Delete the testbed's files, except the directory; the stamp last, because it allows the deletion."""
        if self.stamp.exists():
            for entry in [entry for entry in self.root.iterdir() if entry != self.stamp]:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            self.stamp.unlink()


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Lock the testbed. Makes the root directory, and removes it at the end if it is empty."""
    while True:
        place.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(place.root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _lock(handle, place)
                if os.path.samestat(os.fstat(handle), os.stat(place.root)):
                    yield
                    return
            finally:
                with contextlib.suppress(OSError):
                    place.root.rmdir()
                os.close(handle)


def _lock(handle: int, place: Place) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another scripts/testbed that works on {place.root} ...", file=sys.stderr)
        fcntl.flock(handle, fcntl.LOCK_EX)


def host_names(hosts: int) -> tuple[str, ...]:
    return tuple(f"h{number}" for number in range(1, hosts + 1))


def address(name: str) -> str:
    """Return the address of a host, which only the testbed's namespaces see."""
    return f"10.77.0.{254 if name == CONTROLLER else int(name.removeprefix('h'))}"


def hosts_file(hosts: int) -> str:
    """Return the text of /etc/hosts inside the testbed."""
    names = (*host_names(hosts), CONTROLLER)
    return "127.0.0.1 localhost\n::1 localhost ip6-localhost\n" + "".join(f"{address(name)} {name}\n" for name in names)


def passwd_file(text: str) -> str:
    """The text of /etc/passwd inside the testbed: the machine's, but root's login shell runs no start-up file."""
    lines = (line.split(":") for line in text.splitlines())
    return "".join(f"{':'.join((*words[:-1], '/bin/sh') if words[0] == 'root' else words)}\n" for words in lines)
