"""The fork server of workers by hand: it forks, declines (at once, or after the first) or dies, as `mode` says."""

import os
import socket
import sys
from dataclasses import replace

import worker_by_hand

from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import (
    FORK_DESCRIPTORS,
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    ForkWorker,
    WorkerForked,
)


def serve(mode):
    """As `python -m jaxrun_runtime.forkserver FD workers` of `jaxrun by_hand.py CODE…`."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    (order,) = ForkServerMessageDecoder().feed(channel.recv(2**18))
    assert isinstance(order, ConfigureForkServer)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 2**18, len(FORK_DESCRIPTORS))
        if not request or mode == "die":
            os._exit(0)
        if mode == "decline":
            channel.send(encode(ForkDeclined("a thread was started", "")))
            os._exit(0)
        (worker,) = ForkServerMessageDecoder().feed(request)
        assert isinstance(worker, ForkWorker)
        if mode == "limit" and worker.rank:
            channel.send(encode(ForkDeclined("no process can be forked: Resource temporarily unavailable", "")))
            os._exit(1)
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(worker, dict(zip(FORK_DESCRIPTORS, descriptors, strict=True)), order.program[1:])
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(encode(WorkerForked(worker.rank, pid)))


def _become(worker, descriptors, codes):
    os.setsid()
    for target, stream in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(descriptors[stream], target)
        os.close(descriptors[stream])
    env = WorkerEnv.from_env(worker.environment)
    channel, stacks, flight = (descriptors[name] for name in ("channel", "stacks", "flight"))
    env = replace(env, channel_fd=channel, stacks_fd=stacks, flight_fd=flight)
    os.environ.update({**worker.environment, **env.to_env()})
    worker_by_hand.live(env, codes[env.rank])
