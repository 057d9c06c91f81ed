"""How the processes of a job that somebody else started find rank 0: by a file in a directory that all hosts share.

Rank 0 writes what the others need, readable for its user alone; they look for it until what it says proves to be true.
A file that an earlier job has left leads to nobody, or to somebody who does not know its token, and is looked at again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.job.cluster_env import RankInfo
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.connect import HeadAddress

_TEXTS = ("job_id", "token", "head")


@dataclass(frozen=True, slots=True)
class RendezvousFile:
    """The file of one job, the same on all its ranks."""

    path: Path

    def write(self, job_id: str, token: str, head: str) -> None:
        """All or nothing. UnavailableError where the directory cannot be written."""
        content = json.dumps({"job_id": job_id, "token": token, "head": head})
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(content)
            os.replace(draft, self.path)
        except OSError as error:
            raise UnavailableError(
                f"{self.path.parent} cannot be written ({error.strerror}), where the others would look for rank 0; "
                "name a directory that all hosts share with --rendezvous"
            ) from None

    def read(self) -> HeadAddress | None:
        """What the file says now; None where there is none, or one that says nothing."""
        # On a network file system, to list the directory is what makes a new file of another host appear.
        with contextlib.suppress(OSError):
            os.listdir(self.path.parent)
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in _TEXTS):
            return None
        try:
            return HeadAddress(content["job_id"], content["token"], parse_addresses(content["head"]))
        except UsageError:
            return None

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def rendezvous_file(place: RankInfo, directory: Path) -> RendezvousFile:
    """Where the ranks of this job meet; `directory` must exist. UsageError."""
    if not directory.is_dir():
        raise UsageError(f"--rendezvous {directory} is not a directory on {os.uname().nodename}")
    marks = json.dumps([value for name, value in sorted(asdict(place).items()) if name != "rank"])
    return RendezvousFile(directory / f".jaxrun-attach-{hashlib.sha256(marks.encode()).hexdigest()[:16]}")
