"""One worker of a WorkerHarness: its process, channel, messages and output; and programs whose calls are recorded."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flights import Flight
from harness import TIME_LIMIT, wait_until

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.worker_messages import Failed, WorkerMessageDecoder

ROOT = Path(__file__).parents[2]
_GLOO = re.compile(r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : ")


def without_gloo(text):
    """`text` less Gloo's lines; two devices of one process write theirs at once, and tear each other's apart."""
    kept, after = [], False
    for line in text.splitlines(keepends=True):
        rest = _GLOO.sub("", line)
        gloos = (rest != line or after) and not rest.strip("0123456789\n")
        if not gloos:
            kept.append(line)
        after = gloos
    return "".join(kept)


@dataclass
class HarnessWorker:
    """`status`: as os.waitstatus_to_exitcode returns it; None while the worker lives."""

    channel: socket.socket
    stacks_fd: int
    flight_fd: int
    out_path: Path
    err_path: Path
    pid: int = 0
    status: int | None = None
    messages: list = field(default_factory=list)
    decoder: WorkerMessageDecoder = field(default_factory=WorkerMessageDecoder)
    folder: Path = Path()

    @property
    def out(self):
        """Its standard output, without what Gloo prints when it connects."""
        return without_gloo(self.out_path.read_text(errors="surrogateescape"))

    @property
    def err(self):
        return self.err_path.read_text(errors="surrogateescape")

    @property
    def live(self):
        return self.pid != 0 and self.status is None

    @property
    def flight(self):
        """The present content of its flight recorder."""
        return Flight(self.flight_fd)

    def received(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]

    def failure(self):
        (failure,) = self.received(Failed)
        return failure

    def send(self, message):
        with contextlib.suppress(OSError):
            self.channel.sendall(encode(message))

    def receive(self):
        """Receive what has arrived."""
        while self.channel.fileno() >= 0:
            try:
                data = self.channel.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.channel.close()
                return
            self.messages += self.decoder.feed(data)

    def reap(self):
        if not self.live:
            return
        with contextlib.suppress(ChildProcessError):  # as long as it is the fork server's child
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.receive()
                self.status = os.waitstatus_to_exitcode(status)

    def kill(self):
        if self.live:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait_for_stacks(self, text):
        """Until the stacks of its threads, which its fault handler writes, hold this text."""

        def is_there():
            os.kill(self.pid, STACKS_SIGNAL)  # again and again, as it may not have come there yet
            return text in os.pread(self.stacks_fd, 2**20, 0).decode()

        wait_until(is_there, text)

    def close(self):
        self.kill()
        deadline = time.monotonic() + TIME_LIMIT
        while self.live and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        self.channel.close()
        os.close(self.stacks_fd)
        os.close(self.flight_fd)


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
# Of a rank whose program begins; before Python 3.12, which cannot watch exceptions, the last is not there.
RANK_THREADS = ["MainThread", "jaxrun-stacks", *(["jaxrun-interrupts"] if sys.version_info >= (3, 12) else [])]


def environment():
    """This process's own, with the checkout to import from, one thread for each pool, and two CPU devices."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "PYTHON"))}
    path = os.pathsep.join([str(ROOT / "launcher"), str(ROOT / "runtime")])
    fixed = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return {**kept, **fixed, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def spawn(argv, environ, standard, kept, cwd):
    """As the agent does: a session of its own, three standard streams, and the descriptors `kept` besides."""
    stdin, stdout, stderr = standard
    process = subprocess.Popen(
        list(map(str, argv)),
        env=environ,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=kept,
        cwd=cwd,
        start_new_session=True,
    )
    process.returncode = 0  # its status is waited for elsewhere
    return process.pid


# ---- programs of two processes with two devices each whose calls are recorded, and what was recorded of them

SETTING = """
import os, sys, threading, time
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxrun_runtime as jr

mesh = Mesh(np.array(jax.devices()), ("data",))

def rows(n, dtype=np.float32):
    # n rows of this process
    part = np.arange(n * 3).reshape(n, 3).astype(dtype)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), part)

x = rows(2)
"""


def record(start, script, body, size=2, **more):
    """The ranks of a job that runs `body` to its end, and has recorded."""
    workers = start([script(SETTING + body)], size, **more).run()
    for worker in workers:
        assert worker.status == 0, worker.err
    return workers


def named(worker, name):
    """The records of calls of jit(name)."""
    return [call for call in worker.flight.calls if call.name == f"jit({name})"]


def line_of(body, marker):
    """The number of the line that holds this marker, in a program that `record` runs."""
    lines = (SETTING + body).splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# {marker}" in line)
