"""What a rank may do while others wait for it, in words, and what to do about it: the table of deadlocks.py."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.analysis.diagnosis.rank_state import Activity

# What a rank does that others wait for, and what to do about it; the most likely cause of a deadlock comes first.
CAUSES: Mapping[Activity, tuple[str, str]] = {
    Activity.STOPPED: ("is stopped by a signal", "kill -CONT lets a process go on; its number is in events.jsonl"),
    Activity.TRACED: ("is stopped by a debugger", "let it go on there, or detach it"),
    Activity.DISK: ("waits for a disk or a file server", "does that file system answer, as to ls?"),
    Activity.PROMPT: (
        "waits at a debugger's prompt",
        "type c and Enter in jaxrun's terminal, or take the breakpoint out",
    ),
    Activity.INPUT: (
        "waits for something to read, as in input(),",
        "type it in jaxrun's terminal, or give the answer beforehand: jaxrun … < FILE",
    ),
    Activity.FILE_LOCK: ("waits for a file lock", "who holds it, is it perhaps another rank? lslocks says so"),
    Activity.PROCESS: (
        "waits for a process that it started",
        "what does that process do? ps -ef --forest shows it",
    ),
    Activity.NETWORK: (
        "waits for the network",
        "does the other side answer? a timeout in the program would turn this into an error",
    ),
    Activity.DATA: ("waits for data", "has that which should bring it ended, or does it wait itself?"),
    Activity.THREAD: (
        "waits for a lock or another of its threads",
        "who holds it or should end, and for what does that one wait?",
    ),
    Activity.ENDING: ("is at its end, but has threads that go on", "end them, or make them daemons"),
    Activity.SLEEP: ("sleeps", "every rank must make the same cross-process calls"),
    Activity.COMPILING: (
        "is compiling",
        "it goes on by itself; a persistent cache (JAX_COMPILATION_CACHE_DIR) saves it the next time",
    ),
    Activity.ASLEEP: (
        "is asleep where it has made no cross-process call before,",
        "is that a lock, or the result of an earlier call?",
    ),
}
# What a rank does if it waits for a child that it has forked, unless what it has called begins with one of these.
FOR_CHILDREN = (Activity.PROCESS, Activity.DATA, Activity.THREAD)
NOT_FOR_CHILDREN = ("queue.", "threading.", "subprocess.")
FORK_ADVICE = (
    "its children were forked at {places} with copies of locks that no thread of theirs releases, and may wait for "
    "them for ever; use spawn or forkserver: multiprocessing.get_context('forkserver').Pool(), "
    "ProcessPoolExecutor(mp_context=...), DataLoader(multiprocessing_context=...)"
)
NOTABLE_ALONE = (
    Activity.STOPPED,
    Activity.TRACED,
    Activity.PROMPT,
    Activity.INPUT,
)  # worth a sentence even if no rank waits
TEMPORARY = (Activity.SLEEP, Activity.ASLEEP)  # worth none if no rank waits
