"""The interpreter of a plan that forks, by hand: `… -m jaxrun_runtime LAUNCHER MODE CODE...` is a worker_by_hand.

As `… -m jaxrun_runtime.forkserver FD workers`, with such a program, it forks, declines (at once, or after the first, as
at a limit) or dies, as MODE says.
"""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

_, _, module, *arguments = sys.argv
sys.argv = [sys.argv[0], str(Path(__file__).parents[2] / "launcher")]  # as worker_by_hand wants it
import worker_by_hand  # noqa: E402

from jaxrun.protocol.codec import encode  # noqa: E402
from jaxrun.protocol.env import WorkerEnv  # noqa: E402
from jaxrun.protocol.forkserver_messages import (  # noqa: E402
    FORK_DESCRIPTORS,
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    ForkWorker,
    WorkerForked,
)


def configure():
    (order,) = ForkServerMessageDecoder().feed(channel.recv(2**18))
    assert isinstance(order, ConfigureForkServer)
    return order.program


def serve():
    time.sleep(0.1 if mode != "die" else 0.0)
    if mode == "die":
        os._exit(1)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 2**18, len(FORK_DESCRIPTORS))
        if not request:
            os._exit(0)
        if mode == "decline":
            channel.send(encode(ForkDeclined("a thread was started", "")))
            os._exit(0)
        (order,) = ForkServerMessageDecoder().feed(request)
        assert isinstance(order, ForkWorker)
        if mode == "limit" and order.rank:
            channel.send(encode(ForkDeclined("no process can be forked: Resource temporarily unavailable", "")))
            os._exit(1)
        pid = os.fork()
        if pid == 0:
            channel.close()
            become(order, dict(zip(FORK_DESCRIPTORS, descriptors, strict=True)))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(encode(WorkerForked(order.rank, pid)))


def become(order, descriptors):
    os.setsid()
    for target, stream in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[stream], target)
        os.close(descriptors[stream])
    env = WorkerEnv.from_env(order.environment)
    channel, stacks, flight = (descriptors[name] for name in ("channel", "stacks", "flight"))
    env = replace(env, channel_fd=channel, stacks_fd=stacks, flight_fd=flight)
    worker_by_hand.live(env, codes[env.rank])


channel = socket.socket(fileno=int(arguments[0])) if module.endswith("forkserver") else None
_, mode, *codes = configure() if channel is not None else arguments
if channel is not None:
    serve()
env = WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, codes[env.rank])
