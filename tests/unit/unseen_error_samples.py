"""Dumps of ranks in a hang with errors that nobody has seen, and what is said of them."""

from deadlock_samples import FUTEX, dump

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.verdict.deadlocks import explain_deadlock
from jaxrun.protocol.error_chain import ChainedError, ThreadNotes, format_notes

LIBRARY, JAX, PROGRAM = "/v/lib/python3.13/site-packages/lib/a.py", "/v/lib/site-packages/jax/_src/a.py", "/job/data.py"
BAD = ChainedError("ValueError", "bad record in shard 1", ((PROGRAM, 31, "load"),))


def noted(text, *, main=None, threads=()):
    """A dump with the notes of the main thread; `threads` are (name, frames, notes) of the others."""
    blocks = []
    for name, frames, notes in [*threads, ("", text, main or ThreadNotes())]:
        lines = dump(frames).rstrip("\n").split("\n")
        header = lines[0].replace(" (most", f" [{name}] (most") if name else lines[0]
        blocks.append("\n".join([header, *lines[1:], *format_notes(notes), ""]))
    return "\n".join(blocks)


def stacks(*dumps, helpers=None, finished=()):
    return JobStacks(
        time=0.0,
        hosts=dict.fromkeys(range(len(dumps)), "h1"),
        dumps=dict(enumerate(dumps)),
        waits=dict.fromkeys(range(len(dumps)), FUTEX),
        helpers=helpers,
        finished=finished,
    )


def sentences(*dumps, **more):
    return list(map(str, explain_deadlock(stacks(*dumps, **more))))
