"""Error texts that are consequences of another worker's end."""

from __future__ import annotations

import pytest

from jaxrun.diagnosis.consequences import ErrorOrigin, classify_error, find_consequence

GLOO = (
    "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] "
    "Connection closed by peer [127.0.0.1]:24984"
)
CONSEQUENCES = [
    GLOO,
    "UNKNOWN: Gloo all-reduce failed: [pair.cc:534] Read error [10.0.0.2]:1: Connection reset by peer",
    "Gloo all-reduce failed: Timed out waiting 8000ms for recv operation to complete",
    "Gloo context initialization failed: timed out connecting: Connection refused, remote=[127.0.1.1]",
    "F1121 1 client.h:80] Terminating process because the JAX distributed service detected fatal errors.",
    "This most likely indicates that another task died; see the other task logs for more details.",
    "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted/died",
    "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): 1",
    "E1121 agent.cc:289] Polled an error from coordination service (this can be an error from another task).",
    "INTERNAL: Shutdown barrier has failed. DEADLINE_EXCEEDED # of tasks that reached the barrier: 1/2",
    "NCCL operation ncclAllReduce failed: remote process exited or there was a network error",
    "Getting local topologies failed: Error 1: GetKeyValue() timed out with key: cpu:local_topology/cpu/1",
]
OWN = [
    "ValueError: bad record in shard 2",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "Gloo AllGather failed: Received data size doesn't match expected size. "
    "Is there a distributed collective mismatch in your code?",
    "RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.",
    "TimeoutError: timed out",
    "[Gloo] Rank 2 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2",
    "NCCL operation ncclGroupEnd() failed: unhandled cuda error",
    "",
]


def traceback(*errors: str) -> str:
    return "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "train.py", line 88, in step',
            "    run(batch)",
            *errors,
        ]
    )


CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
MEANWHILE = "\n\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize("text", CONSEQUENCES)
def test_a_consequence_of_another_process_is_recognised(text: str) -> None:
    assert find_consequence(text)
    assert classify_error(text, traceback(f"ValueError: {text}")) is ErrorOrigin.OTHER


@pytest.mark.parametrize("text", OWN)
def test_a_fault_of_the_process_itself_is_not(text: str) -> None:
    assert not find_consequence(text)
    assert classify_error(text, traceback(text)) is ErrorOrigin.OWN


def test_signs_in_source_lines_of_a_traceback_do_not_count() -> None:
    shown = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
    shown += f'    raise KeyError("{GLOO}"[0])\nKeyError: "U"'
    assert classify_error("'U'", shown) is ErrorOrigin.OWN


@pytest.mark.parametrize("separator", [CAUSED, MEANWHILE])
def test_an_error_raised_in_the_handling_of_a_broken_connection_is_a_consequence(separator: str) -> None:
    chain = traceback(f"ValueError: {GLOO}") + separator + traceback("TrainError: step 7 failed")
    assert classify_error("step 7 failed", chain) is ErrorOrigin.OTHER


def test_a_broken_connection_that_an_own_error_caused_is_its_own() -> None:
    chain = traceback("ValueError: bad record") + CAUSED + traceback(f"ValueError: {GLOO}")
    assert classify_error(GLOO, chain) is ErrorOrigin.OWN


def test_a_broken_connection_met_while_handling_an_own_error_is_unclear() -> None:
    chain = traceback("queue.Empty") + MEANWHILE + traceback(f"ValueError: {GLOO}")
    assert classify_error(GLOO, chain) is ErrorOrigin.UNCLEAR


def test_a_chain_of_own_errors_is_its_own() -> None:
    chain = traceback("KeyError: 'x'") + MEANWHILE + traceback("ValueError: bad record")
    assert classify_error("bad record", chain) is ErrorOrigin.OWN


@pytest.mark.parametrize(("leaf", "blame"), [(GLOO, ErrorOrigin.UNCLEAR), ("bad record", ErrorOrigin.OWN)])
def test_a_group_is_judged_by_what_it_holds(leaf: str, blame: ErrorOrigin) -> None:
    try:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError(leaf)])
    except ExceptionGroup as group:
        import traceback as python

        text = "".join(python.format_exception(group))
        assert classify_error(str(group), text) is blame
