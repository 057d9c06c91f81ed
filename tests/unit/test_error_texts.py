"""What error texts mean: which are known, and which are consequences of another worker's end.

known_errors.txt has the real texts: of each the row that explains it, where it is from, and the text itself.
"""

import re
import signal
import time
import traceback as python_traceback
from pathlib import Path

import pytest

from jaxrun.analysis.diagnosis.consequences import ErrorOrigin, classify_error, find_consequence
from jaxrun.analysis.diagnosis.job_outcome import WorkerOutcome
from jaxrun.analysis.verdict import error_lookup
from jaxrun.analysis.verdict.known_errors import KNOWN_ERRORS
from jaxrun.protocol.worker_messages import Failed, ThreadFailed

_FILE = Path(__file__).with_name("known_errors.txt")
_PARTS = re.split(r"^\[([a-z0-9-]+)\] .*\n", _FILE.read_text(), flags=re.MULTILINE)
EXAMPLES = [(key, text.rstrip("\n")) for key, text in zip(_PARTS[1::2], _PARTS[2::2], strict=True)]
TEXTS = {key: text for key, text in reversed(EXAMPLES)}  # the first of each row
FILTERED = "For simplicity, JAX has removed its internal frames from the traceback.\n"
REMOTE = TEXTS["not-addressable"]
MISMATCH, LOOPBACK = TEXTS["collective-mismatch"], TEXTS["loopback"]


def died(status, **more):
    return WorkerOutcome(0, "h1", 1.0, status, **more)  # type: ignore[arg-type]


def raised(message, traceback="", *, tail="", error="ValueError"):
    return died(1, failure=Failed(0, 0.0, "program", 1, error, message, traceback), stderr_tail=tail)


@pytest.mark.parametrize(("key", "text"), EXAMPLES)
def test_a_text_matches_its_row_and_none_before_it_and_fills_in_its_numbers(key, text):
    assert next((name for name, row in KNOWN_ERRORS.items() if row.search(text)), "no row") == key
    known = error_lookup.find_explanation(text)
    assert known.means and "{" not in known.means + known.advice and "None" not in known.means + known.advice


def test_every_row_has_an_example():
    assert set(TEXTS) == KNOWN_ERRORS.keys()
    assert len(KNOWN_ERRORS) >= 25


def test_numbers_of_the_text_stand_in_the_sentences():
    known = error_lookup.find_explanation(TEXTS["local-data-size"])
    assert known.means == "this process passed 3 entries of axis 0, but its devices hold 2."
    assert known.advice.startswith("pass each process's own 2 entries")


@pytest.mark.parametrize("text", ["", "bad record in shard 2", "KeyError: 'x'", "Connection reset by peer", FILTERED])
def test_an_unknown_text_is_not_explained(text):
    assert error_lookup.find_explanation(text, text) == error_lookup.ErrorExplanation()


CHAIN = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
    "RuntimeError: can't start new thread\n\n"
    "During handling of the above exception, another exception occurred:\n\n"
)
TWICE = "ABORTED: /job:jax_worker/replica:0/task:3 unexpectedly tried to connect with a different incarnation."
SOURCE_LINE = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    raise E("{REMOTE}")\nE: other\n'
THREAD = ThreadFailed(0, 0.0, "Loader", "RuntimeError", "Traceback:\nRuntimeError: can't start new thread\n")
EVIDENCE = {
    "an exception's message before its chain": (raised(REMOTE, f"{CHAIN}RuntimeError: {REMOTE}\n"), "other processes"),
    "its chain": (raised("cannot load shard", f"{CHAIN}ValueError: cannot load\n"), "no further thread"),
    "neither a source line nor the log of a rank that raised": (raised("other", SOURCE_LINE, tail=MISMATCH), ""),
    "stderr without an exception": (died(-signal.SIGABRT, stderr_tail=MISMATCH), "16 bytes came where 8"),
    "stderr with a SystemExit": (raised("", tail=MISMATCH, error="SystemExit"), "16 bytes came where 8"),
    "not that of a rank that was killed": (died(-signal.SIGKILL, stderr_tail=MISMATCH), ""),
    "nor that of one that was terminated": (died(-signal.SIGTERM, stderr_tail=MISMATCH), ""),
    "nor that of one that was lost": (died(None, stderr_tail=MISMATCH, lost_reason="it is off"), ""),
    "a thread that died before its rank": (died(-signal.SIGSEGV, thread_failures=(THREAD,)), "no further thread"),
}


@pytest.mark.parametrize(("worker", "means"), EVIDENCE.values(), ids=EVIDENCE)
def test_what_explains_the_end_of_a_rank(worker, means):
    found = error_lookup.explain_worker(worker).means
    assert means in found and bool(means) is bool(found)


def test_of_a_consequence_only_texts_that_name_a_cause_are_believed():
    assert "127.0.1.1" in error_lookup.explain_consequence(raised(LOOPBACK), several_hosts=True).means
    assert error_lookup.explain_consequence(raised(LOOPBACK), several_hosts=False).means == ""
    assert "joined the job as rank 3" in error_lookup.explain_consequence(raised(TWICE), several_hosts=False).means
    assert error_lookup.explain_consequence(raised(REMOTE), several_hosts=True).means == ""


def test_both_ends_of_a_long_text_are_searched_and_the_middle_is_not():
    filler = "x" * 50_000
    assert error_lookup.find_explanation(f"{REMOTE}{filler}").means
    assert error_lookup.find_explanation(f"{filler}{REMOTE}").means
    assert error_lookup.find_explanation(f"{filler}{REMOTE}{filler}").means == ""


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES])
def test_a_hostile_text_takes_no_longer_than_its_length_allows(text):
    hostile = "".join(text[: len(text) * part // 4] for part in (3, 2, 1)) or "x"
    before = time.process_time()
    error_lookup.find_explanation(hostile * (100_000 // len(hostile)))
    assert time.process_time() - before < 1.0


# ---- consequences of another worker's end

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


def traceback(*errors):
    return "\n".join(
        ["Traceback (most recent call last):", '  File "train.py", line 88, in step', "    run(batch)", *errors]
    )


CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
MEANWHILE = "\n\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize("text", CONSEQUENCES)
def test_a_consequence_of_another_process_is_recognised(text):
    assert find_consequence(text)
    assert classify_error(text, traceback(f"ValueError: {text}")) is ErrorOrigin.OTHER


@pytest.mark.parametrize("text", OWN)
def test_a_fault_of_the_process_itself_is_not(text):
    assert not find_consequence(text)
    assert classify_error(text, traceback(text)) is ErrorOrigin.OWN


LOST, BAD, FAILED = f"ValueError: {GLOO}", "ValueError: bad record", "TrainError: step 7 failed"
CHAINS = {
    "a sign in a source line": ("'U'", traceback(f'    raise KeyError("{GLOO}"[0])', "KeyError: 'U'"), ErrorOrigin.OWN),
    "caused by one": ("step 7 failed", traceback(LOST) + CAUSED + traceback(FAILED), ErrorOrigin.OTHER),
    "in the handling of one": ("step 7 failed", traceback(LOST) + MEANWHILE + traceback(FAILED), ErrorOrigin.OTHER),
    "one that an own error caused": (GLOO, traceback(BAD) + CAUSED + traceback(LOST), ErrorOrigin.OWN),
    "one met while handling an own error": (
        GLOO,
        traceback("queue.Empty") + MEANWHILE + traceback(LOST),
        ErrorOrigin.UNCLEAR,
    ),
    "own errors": ("bad record", traceback("KeyError: 'x'") + MEANWHILE + traceback(BAD), ErrorOrigin.OWN),
}


@pytest.mark.parametrize(("message", "chain", "origin"), CHAINS.values(), ids=CHAINS)
def test_the_origin_of_an_error_is_found_in_its_chain(message, chain, origin):
    assert classify_error(message, chain) is origin


@pytest.mark.parametrize(("leaf", "blame"), [(GLOO, ErrorOrigin.UNCLEAR), ("bad record", ErrorOrigin.OWN)])
def test_a_group_is_judged_by_what_it_holds(leaf, blame):
    try:
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError(leaf)])
    except ExceptionGroup as group:
        text = "".join(python_traceback.format_exception(group))
        assert classify_error(str(group), text) is blame
