"""Ends of workers, and the verdicts on them."""

import signal

from jaxrun.analysis.diagnosis.job_end import RankFailed
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.root_cause import find_culprits
from jaxrun.analysis.verdict.decide import decide as decide_verdict
from jaxrun.protocol.worker_messages import Failed, ThreadFailed

GLOO = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:24984"
ABORT = (
    "F1121 client.h:80] Terminating process because the JAX distributed service detected fatal errors.\n"
    "    @     0x7f96cb840634  absl::lts_20260107::log_internal::LogMessage::SendToLog()\n"
)
HOSTS = {rank: f"h{rank // 2}" for rank in range(4)}
START, RUN_AT, DECIDED, NOW = 1000.0, 1002.0, 1012.0, 1012.5


def failed(rank, message, *, error="ValueError", status=1, stage="program"):
    traceback = f'Traceback (most recent call last):\n  File "train.py", line 88, in step\n{error}: {message}\n'
    return Failed(rank, 0.0, stage, status, error, message, "" if error == "SystemExit" else traceback)


def end(rank, at, status=None, **more):
    return WorkerOutcome(rank, HOSTS[rank], RUN_AT + at, status, **more)


def raised(rank, at, message="bad record", thread_failures=(), lost_pool_workers=(), **more):
    lost = {"thread_failures": thread_failures, "lost_pool_workers": lost_pool_workers}
    return end(rank, at, 1, failure=failed(rank, message, **more), **lost)


def stopped(*ranks):
    return [end(rank, 10.0, -signal.SIGKILL, killed_by_launcher=True) for rank in ranks]


def thread(rank, error="KeyError"):
    traceback = f'Traceback (most recent call last):\n  File "data.py", line 3, in load\n{error}: "x"\n'
    return ThreadFailed(rank, 0.0, "Loader-1", error, traceback)


def weigh(*ends, run_at=RUN_AT, hosts=HOSTS):
    return decide_verdict(JobOutcome(RankFailed(), hosts, ends, run_at=run_at), started=START, ended=NOW)


def culprit_ranks(ends):
    return tuple(end.rank for end in find_culprits(ends))


def where(dumps, waits=(), **more):
    """The ranks have these stacks; `waits`: the kernel functions in which they sleep, or one for all."""
    by_rank = dict.fromkeys(dumps, waits) if isinstance(waits, str) else dict(waits)
    return JobStacks(DECIDED, HOSTS, dumps, by_rank, **more)


def decide(ends, why, **facts):
    outcome = JobOutcome(why, HOSTS, tuple(ends), decided_at=DECIDED, run_at=RUN_AT, **facts)
    return decide_verdict(outcome, started=START, ended=NOW, timeout=10.0)
