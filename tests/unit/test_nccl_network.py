"""The rank's side of NCCL's network: what is set for NCCL, and what is reported of what it writes."""

import os
import socket
import threading

import pytest
from nccl_logs import LOGS

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.protocol.worker_messages import NcclNetwork, WorkerMessageDecoder
from jaxrun_runtime import nccl_network
from jaxrun_runtime.agent_channel import AgentChannel

NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


@pytest.fixture
def watch(monkeypatch):
    """watch(…) of rank 3, the first on its host, and the agent's end of its channel."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.setattr(nccl_network, "_POLL_INTERVAL_S", 0.01)
    ours, theirs = socket.socketpair()
    channel = AgentChannel(theirs.detach())

    def start(platform="gpu", **changes):
        values = {"job_id": "ab" * 16, "rank": 3, "size": 6, "local_rank": 0, "local_size": 3, "host": "h2",
            "channel_fd": 0, "stacks_fd": 0, "flight_fd": 0, **changes}  # fmt: skip
        nccl_network.watch(WorkerEnv(**vars_of(WorkerSettings()), **values), channel, platform)
        return ours

    yield start
    ours.close()
    channel._socket.close()


def vars_of(settings):
    return {name: getattr(settings, name) for name in settings.__slots__}


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "jaxrun-nccl"]


def test_what_nccl_writes_to_the_file_that_it_is_given_is_reported(watch):
    agent = watch()
    assert [os.environ[name] for name in NAMES[::2]] == ["INFO", "INIT,NET"]
    log, network, provider = LOGS["a plugin of 2023"]
    with open(os.environ["NCCL_DEBUG_FILE"], "w", buffering=1) as file:  # as NCCL opens it
        file.write(log)
        (message,) = WorkerMessageDecoder().feed(agent.recv(4096))
    assert message == NcclNetwork(3, message.time, network, provider)
    for thread in threads():
        thread.join()
    os.close(int(os.environ["NCCL_DEBUG_FILE"].rpartition("/")[2]))


@pytest.mark.parametrize("changes", [{"platform": "cpu"}, {"local_rank": 1}, {"local_size": 6}], ids=str)
def test_nothing_is_set_where_there_is_no_way_between_gpu_hosts_or_another_rank_tells(watch, changes):
    watch(**changes)
    assert threads() == [] and not any(os.environ[name] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_log_that_the_user_has_asked_for_is_left_alone(watch, monkeypatch, name):
    monkeypatch.setenv(name, "x")
    watch()
    assert threads() == [] and [os.environ[one] for one in NAMES if os.environ[one]] == ["x"]
