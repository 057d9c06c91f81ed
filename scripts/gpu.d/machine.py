"""The machine that the checks of scripts/gpu run on, and jobs on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
_SMI = ("nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader")
_SMI_MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class Failed(Exception):
    """A check has not shown what it should; `output` is what the job has printed."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi lists it."""

    uuid: str
    name: str


@dataclass(frozen=True)
class Done:
    """A command that has ended, and how many seconds that took."""

    status: int
    output: str
    seconds: float

    def expect(self, status: int, *patterns: str) -> Done:
        """Return itself. Raises Failed for another exit status, or a regular expression that the output lacks."""
        if self.status != status:
            raise Failed(f"exit {self.status} instead of {status}", self.output)
        for pattern in patterns:
            self.find(pattern)
        return self

    def find(self, pattern: str) -> str:
        """Return what the regular expression matches first, blanks as one each. Raises Failed."""
        found = re.search(pattern, self.output, re.MULTILINE)
        if found is None:
            raise Failed(f"no text like {pattern!r}", self.output)
        return " ".join(found[0].split())


@dataclass(frozen=True)
class Machine:
    """`platform` is cuda or, to try the script itself, cpu."""

    platform: str
    gpus: tuple[Gpu, ...]

    @property
    def ranks(self) -> int:
        """A job with one rank for each GPU; on a CPU of two."""
        return len(self.gpus) or 2

    def jaxrun(self, *words: str | Path, env: Mapping[str, str] | None = None, limit: float = 180) -> Done:
        """Run `jaxrun WORDS` on this platform, in a directory of its own, for at most `limit` seconds."""
        return run(sys.executable, "-m", "jaxrun", "--platform", self.platform, *words, env=env, limit=limit)

    def __str__(self) -> str:
        kinds = Counter(gpu.name for gpu in self.gpus)
        return ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "CPUs only"


def run(*words: str | Path, env: Mapping[str, str] | None = None, limit: float = 180) -> Done:
    """Run a command in a temporary directory. Raises Failed if it has not ended after `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="jaxrun-gpu-") as directory:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [str(word) for word in words],
                cwd=directory,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            raise Failed(f"still running after {limit:g} s", output.decode(errors="replace")) from None
        return Done(done.returncode, done.stdout, time.monotonic() - began)


def used_memory() -> list[float]:
    """The MiB of memory in use on each GPU of nvidia-smi."""
    listed = subprocess.run(_SMI_MEMORY, capture_output=True, text=True, timeout=60, check=True).stdout
    return [float(line) for line in listed.splitlines()]


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, by nvidia-smi's index; none where it is not there or does not answer."""
    try:
        listed = subprocess.run(_SMI, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = (line.split(",", 1) for line in listed.splitlines() if "," in line)
    return tuple(Gpu(uuid.strip(), name.strip()) for uuid, name in lines)
