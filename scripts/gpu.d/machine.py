"""The machine that the checks of scripts/gpu run on, and jobs on it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("ga", "gb")  # the names of the two hosts that this machine simulates
PROGRAMS = Path(__file__).with_name("programs")
_SMI = ("nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader")
_SMI_MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class Failed(Exception):
    """Raised if a check fails. `output`: the output of the job."""

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
    """A command that has ended, with the seconds that it took."""

    status: int
    output: str
    seconds: float

    def expect(self, status: int, *patterns: str) -> Done:
        """Return self. Raises Failed for another exit status, or if the output does not match `pattern`."""
        if self.status != status:
            raise Failed(f"exit {self.status} instead of {status}", self.output)
        for pattern in patterns:
            self.find(pattern)
        return self

    def find(self, pattern: str) -> str:
        """Return the first match of the regular expression, with single spaces. Raises Failed if there is none."""
        found = re.search(pattern, self.output, re.MULTILINE)
        if found is None:
            raise Failed(f"no text like {pattern!r}", self.output)
        return " ".join(found[0].split())

    def find_sentence(self, pattern: str) -> str:
        """Return the first match in the output without its line breaks. Raises Failed if there is none."""
        return Done(self.status, " ".join(self.output.split()), self.seconds).find(pattern)


@dataclass(frozen=True)
class Machine:
    """The machine. `platform`: cuda, or cpu to try the script itself."""

    platform: str
    gpus: tuple[Gpu, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks of a job: one for each GPU; 2 on CPUs."""
        return len(self.gpus) or 2

    def jaxrun(self, *words: str | Path, env: Mapping[str, str] | None = None, limit: float = 180) -> Done:
        """Run `jaxrun WORDS` on this platform, in a new directory, for at most `limit` seconds."""
        return run(sys.executable, "-m", "jaxrun", "--platform", self.platform, *words, env=env, limit=limit)

    def pair(self, *words: str | Path, fate: str, limit: float = 120) -> Done:
        """Run pair.py as two ranks on two hosts, which are this machine under two names. Returns the first's status.

        Both use the first GPU. NCCL connects two ranks on one GPU, by sockets, if it takes their hosts to be different.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        head = ("--platform", self.platform, "--hosts", "2", "--head", f"127.0.0.1:{port}", "-n", "2")
        program = (PROGRAMS / "pair.py", fate)
        shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2", "NCCL_SOCKET_IFNAME": "lo"}
        if self.gpus:
            shared["CUDA_VISIBLE_DEVICES"] = self.gpus[0].uuid
        commands = [
            ((*as_host(name), *head, "--host-rank", str(rank), *words, *program), {**shared, "NCCL_HOSTID": name})
            for rank, name in enumerate(HOSTS)
        ]
        return run_together(commands, limit)

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


@functools.cache
def host_command() -> tuple[str, ...]:
    """Return the words that run a command under another host name; the name and the command follow them."""
    rename = ("bash", "-c", 'hostname "$0" && exec "$@"')
    for unshare in (("unshare", "--uts"), ("unshare", "--user", "--map-root-user", "--uts")):
        with contextlib.suppress(OSError):
            if subprocess.run([*unshare, *rename, "other", "true"], capture_output=True).returncode == 0:
                return (*unshare, *rename)
    return ()


def as_host(name: str) -> tuple[str, ...]:
    """Return the words for `jaxrun` under this host name. If namespaces are not allowed, Python simulates the name."""
    if words := host_command():
        return (*words, name, sys.executable, "-m", "jaxrun")
    return (sys.executable, str(Path(__file__).with_name("as_host.py")), name)


def run_together(commands: Sequence[tuple[Sequence[str | Path], Mapping[str, str]]], limit: float) -> Done:
    """Run commands in one temporary directory. Returns the status of the first. Raises Failed after `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="jaxrun-gpu-") as directory, contextlib.ExitStack() as stack:
        began, running, outputs = time.monotonic(), [], []
        for number, (words, env) in enumerate(commands):
            outputs.append(Path(directory) / f"output-{number}")
            file = stack.enter_context(outputs[-1].open("wb"))
            process = subprocess.Popen(
                [str(word) for word in words],
                cwd=directory,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # its guard ends what it has started
            running.append(process)
        try:
            statuses = [process.wait(max(0.0, began + limit - time.monotonic())) for process in running]
        except subprocess.TimeoutExpired:
            output = "\n".join(path.read_text(errors="replace") for path in outputs)
            raise Failed(f"still running after {limit:g} s", output) from None
        output = "\n".join(path.read_text(errors="replace") for path in outputs)
        return Done(statuses[0], output, time.monotonic() - began)


def used_memory() -> list[float]:
    """Return the MiB of memory in use on each GPU of nvidia-smi."""
    listed = subprocess.run(_SMI_MEMORY, capture_output=True, text=True, timeout=60, check=True).stdout
    return [float(line) for line in listed.splitlines()]


def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, by nvidia-smi's index; none if nvidia-smi is missing or does not answer."""
    try:
        listed = subprocess.run(_SMI, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = (line.split(",", 1) for line in listed.splitlines() if "," in line)
    return tuple(Gpu(uuid.strip(), name.strip()) for uuid, name in lines)
