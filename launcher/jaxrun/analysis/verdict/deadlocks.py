"""Explains the common deadlocks, each in one sentence: which rank does what, where, and what to do about it.

The stacks of a healthy job may show the same for a moment, so the sentences only say what the ranks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import ACTIVITY_WORDS, WAITING, Activity, RankState
from jaxrun.analysis.diagnosis.stacks import Ending
from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of
from jaxrun.analysis.lockstep.joint_waits import MissingRanks
from jaxrun.analysis.verdict.error_text import describe_handled, describe_wait
from jaxrun.analysis.verdict.lost_helpers import describe_lost
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.text import agree, format_ranks, format_ranks_on_hosts, group_alike

# Activities that other ranks wait for, and advice for each; the most likely cause of a deadlock comes first.
# What to try, the likeliest causes first.
_ADVICE: Mapping[Activity, str] = {
    Activity.STOPPED: "kill -CONT PID resumes a process; events.jsonl has the PID",
    Activity.TRACED: "continue it there, or detach the debugger",
    Activity.DISK: "does the file system answer (try ls)? does the GPU's driver (try nvidia-smi)?",
    Activity.PROMPT: "continue it in jaxrun's terminal (c and Enter) or in the editor, or remove the breakpoint",
    Activity.INPUT: "type it in jaxrun's terminal, or redirect its input: jaxrun … < FILE",
    Activity.FILE_LOCK: "who holds it? perhaps another rank: lslocks shows it",
    Activity.PROCESS: "what is that process doing? ps -ef --forest shows it",
    Activity.NETWORK: "does the other side answer? with a timeout in the program, this would be an error",
    Activity.DATA: "has its producer ended, or is the producer waiting, too?",
    Activity.THREAD: "which thread holds it or must end, and what does that thread wait for?",
    Activity.EVENTS: "which task never ends? what that task waits for may have failed",
    Activity.ENDING: "",  # the details are in _ENDINGS
    Activity.SLEEP: "every rank must make the same cross-process calls",
    Activity.COMPILING: "it will finish by itself; with a persistent cache (JAX_COMPILATION_CACHE_DIR) it is not "
    "repeated",
    Activity.ASLEEP: "does it wait for a lock, or for an earlier call?",
}
# On GPUs, the kernels of a program of several ranks are tuned jointly: each rank's compiler waits for the others.
_TOGETHER_ADVICE = "every rank must make the same calls, of the same functions and with the same shapes"
_UNKNOWN_ADVICE = (
    "a program for its own GPUs compiles by itself; one for several ranks waits for those that do not compile"
)
# What a rank waits for after its program has ended, and what to do about it.
_ENDINGS: Mapping[Ending, tuple[str, str]] = {
    Ending.THREADS: ("has threads that still run", "end them, or make them daemons: Thread(daemon=True)"),
    Ending.CHILDREN: (
        "waits for child processes that it started",
        "end them; those of multiprocessing may be daemons: Process(daemon=True)",
    ),
    Ending.QUEUE: (
        "waits for the thread of a multiprocessing.Queue, whose data no process takes",
        "read it, or drop it with cancel_join_thread()",
    ),
    Ending.HANDLER: (
        "is still in its exit handler",
        "what does this function, registered with atexit, wait for?",
    ),
    Ending.FINALIZER: ("is still in the finalizer of an object,", "what does this function wait for?"),
    Ending.MPI: ("waits in MPI_Finalize", "every rank must end for it to return"),
}
_FORKING = ("multiprocessing.", "torch")  # calls that may wait for children begin with these
_FORK_ADVICE = (
    "a forked child has copies of locks that no thread of its own releases, and may wait for them forever; use spawn "
    "or forkserver: multiprocessing.get_context('forkserver').Pool(), DataLoader(multiprocessing_context=...)"
)
_POOL_ADVICE = (
    "multiprocessing.Pool never answers for its task; concurrent.futures.ProcessPoolExecutor raises BrokenProcessPool"
)
_DEAD_ADVICE = "if it produced the data, no more will come"
_FUTURE_ADVICE = "future.result() raises it; if its task was to bring the data, no more will come"
_ALONE_ADVICE = "has the producer of the data ended?"
_HANDLED_ADVICE = "this error came first; code that runs after an error must not wait for other ranks"
_SAVE_ADVICE = "the program gets this error at its next call of the checkpointer"
_NOTABLE_ALONE = (
    Activity.STOPPED,
    Activity.TRACED,
    Activity.PROMPT,
    Activity.INPUT,
    Activity.ENDING,
)  # reported even if no rank waits
_TEMPORARY = (Activity.SLEEP, Activity.ASLEEP)  # reported only if a rank waits


_MAX_EXPLANATIONS = 2
_MAX_GROUPS = 3  # of ranks that wait at different places
_MAX_THREADS_SHOWN = 2
SAME_STEPS = "every rank must take part in the same steps"


class DeadlockCause(Struct, frozen=True):
    """What a rank does, where, and who waits for it; `advice` says what to do, and is empty if `what` already does.

    brief:     `what` without the ranks that wait; empty if nothing shorter says it
    is_error:  it names an error that came first: a rank handles it, or a task, thread or process of it has failed
    """

    what: str
    advice: str
    advises_same_steps: bool = False
    brief: str = ""
    is_error: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.advice}" if self.advice else self.what


class _JobState(Struct, frozen=True):
    """The activity of each unfinished rank, and the finished ranks; the other fields are those of JobStacks."""

    ranks: Mapping[int, RankState]
    hosts: Mapping[int, str]
    finished: tuple[int, ...]
    flights: Mapping[int, Flight]
    platform: str
    raised: Mapping[int, str]
    time: float

    def doing(self, *kinds: Activity) -> tuple[int, ...]:
        return tuple(rank for rank, where in self.ranks.items() if where.activity in kinds)

    def names(self, ranks: Iterable[int]) -> str:
        return format_ranks_on_hosts(ranks, self.hosts)

    def end_of(self, ranks: Sequence[int]) -> str:
        """How these ranks ended, in two words: `has finished`, or `have raised ValueError`."""
        errors = {self.raised.get(rank, "") for rank in ranks}
        return f"{agree('has', len(ranks))} {f'raised {errors.pop()}' if errors and all(errors) else 'finished'}"


def explain_deadlock(stacks: JobStacks) -> tuple[DeadlockCause, ...]:
    """Return at most two explanations of why the job makes no progress; empty if nothing is certain enough."""
    graph = wait_graph_of(stacks)
    busy, idle = graph.busy_states, graph.states.keys() - graph.busy_states.keys()
    ended = tuple(sorted((graph.finished - graph.states.keys()) | idle))
    job = _JobState(busy, stacks.hosts, ended, stacks.flights, stacks.platform, stacks.raised, stacks.time)
    in_joint_calls = set(job.doing(Activity.JOINT_CALL))
    standing = [waits for waits in graph.joint_waits if in_joint_calls.issuperset(waits.waiting)]  # by the stacks, too
    joint = [_describe_joint_wait(job, waits) for waits in sorted(standing, key=lambda waits: waits.since)]
    errors = list(_explain_errors(job))
    if errors and (job.finished or any(not state.errors for state in job.ranks.values())):
        return tuple([*errors, *joint])[:_MAX_EXPLANATIONS]
    are_explained = joint and len(job.doing(*WAITING, Activity.SLEEP)) == len(job.ranks)
    explanations = joint if are_explained else [*joint, *_explain_stacks(job)]
    # An exception that every rank handles explains no difference between them.
    return tuple([*explanations[:1], *errors, *explanations[1:]])[:_MAX_EXPLANATIONS]


def _explain_errors(job: _JobState) -> Iterator[DeadlockCause]:
    """Yield `rank 1 handles ValueError: bad record (data.py:31 load) and waits in …, and ranks 0, 2 wait for it in …`.

    There is one cause for all ranks that handle the same exception at the same place.
    """
    handling = {rank: state for rank, state in job.ranks.items() if state.errors}
    groups = group_alike({rank: (state.errors[0], _does(state)) for rank, state in handling.items()})
    for number, ((error, does), group) in enumerate(groups):
        waiting = tuple(rank for rank in job.doing(*WAITING) if rank not in handling) if number == 0 else ()
        and_others = f", and {_describe_waiting(job, waiting, group)}" if waiting else ""
        many = len(group) > 1
        did = describe_handled(error, job.names(group), agree(does, len(group)), many=many)
        advice = _SAVE_ADVICE if error.save is not None else _HANDLED_ADVICE
        yield DeadlockCause(f"{did}{and_others}", advice, brief=did, is_error=True)


def _does(state: RankState) -> str:
    """Write what a rank does, after "rank 1 handles … and": `waits in JAX's barrier 'close' at train.py:5 close`."""
    if state.activity in WAITING:
        return f"waits {_describe_place(state)}"
    does = _words(state)
    return f"{does} at {state.place}" if state.place else does


def _words(state: RankState) -> str:
    return ACTIVITY_WORDS[state.activity].full if state.activity in ACTIVITY_WORDS else "is"


def _explain_stacks(job: _JobState) -> Iterator[DeadlockCause]:
    waiting = job.doing(*WAITING)
    if waiting and len(waiting) == len(job.ranks):
        return _left_by_the_finished(job, waiting) if job.finished else _waiting_apart(job, waiting)
    return _causes(job, waiting)


def _describe_joint_wait(job: _JobState, waits: MissingRanks) -> DeadlockCause:
    """Write `rank 0 waits in jaxrun_runtime.snapshot (t.py:9 main) for rank 1, which has not called it: …`."""
    who = f"{job.names(waits.waiting)} {agree('waits', len(waits.waiting))}"
    place = f" ({waits.place})" if waits.place else ""
    finished = waits.missing_of(job.finished)
    missing = finished or waits.missing
    did = f"{job.end_of(missing)} without calling it" if finished else f"{agree('has', len(missing))} not called it"
    rule = f"{waits.function}{place} for {job.names(missing)}, which {did}: all ranks must"
    groups = _group(job, [rank for rank in missing if rank in job.ranks and job.ranks[rank].place])
    where = _list([_describe_missing(job, group) for group in groups])
    return DeadlockCause(f"{who} in {rule}{f'; {where}' if where else ''}", "", advises_same_steps=True)


def _describe_missing(job: _JobState, group: tuple[int, ...]) -> str:
    """Write `rank 1 sleeps at t.py:12 main`, or `ranks 1-2 wait in a barrier (…)`."""
    state = job.ranks[group[0]]
    if state.activity in WAITING and state.is_certain:
        return f"{job.names(group)} {agree('waits', len(group))} {_describe_place(state)}"
    does = _words(state)
    return f"{job.names(group)} {agree(does, len(group))} at {state.place}"


def _causes(job: _JobState, waiting: tuple[int, ...]) -> Iterator[DeadlockCause]:
    """Yield the causes if some ranks do not wait in JAX."""
    others = tuple(rank for rank in job.ranks if rank not in waiting)
    by_weight = [*_ADVICE, *Activity]
    groups = sorted(
        _group(job, others), key=lambda group: (by_weight.index(job.ranks[group[0]].activity), len(group), group)
    )
    explained = [group for group in groups if _is_notable(job, group, waiting)]
    is_stuck = any(job.ranks[group[0]].activity not in _TEMPORARY for group in explained)  # not without help
    if len(waiting) == 1 and len(others) + len(job.finished) > 1 and not is_stuck:
        yield _describe_lone_waiter(job, waiting, others)
        return
    for number, group in enumerate(explained):
        yield _describe_cause(job, group, waiting if number == 0 else ())
    elsewhere = job.doing(Activity.ELSEWHERE)
    if waiting and not explained and elsewhere and len(elsewhere) == len(others):
        where = _list(_unique(job.ranks[rank].place for rank in elsewhere))
        brief = f"{job.names(elsewhere)} {agree('is', len(elsewhere))} not in JAX but at {where}"
        what = f"{brief}, and {_describe_waiting(job, waiting, elsewhere)}"
        yield DeadlockCause(what, "is this code slow, or in an endless loop?", brief=brief)


def _is_notable(job: _JobState, group: tuple[int, ...], waiting: tuple[int, ...]) -> bool:
    doing = job.ranks[group[0]].activity
    if doing not in _ADVICE:
        return False
    if waiting or doing in _NOTABLE_ALONE or job.ranks[group[0]].waits_for_the_dead:
        return True
    # No rank waits: report it only if every rank of the job does the same.
    return doing not in _TEMPORARY and all(where.activity in (doing, *_NOTABLE_ALONE) for where in job.ranks.values())


def _describe_cause(job: _JobState, group: tuple[int, ...], waiting: tuple[int, ...]) -> DeadlockCause:
    where = job.ranks[group[0]]
    if where.ending is not None:
        return _describe_ending(job, group, where.ending, waiting)
    does, advice = _words(where), _ADVICE[where.activity]
    children = [child for rank in group for child in job.ranks[rank].helpers.live_children]
    if where.call.startswith(_FORKING) and any(child.is_fork for child in children):
        advice = _FORK_ADVICE
    call = f" ({where.call})" if where.call and where.activity is not Activity.COMPILING else ""
    place = f" at {where.place}" if where.place else ""
    if where.activity is Activity.COMPILING and (needed := _not_compiling(job, group)):
        place += f", which on several GPUs waits for the ranks that do not compile ({job.names(needed)})"
        advice = _TOGETHER_ADVICE
    elif where.activity is Activity.COMPILING and not _is_compiling_known(job, group):
        advice = _UNKNOWN_ADVICE
    shown = ", ".join(where.other_threads[:_MAX_THREADS_SHOWN])
    threads = f" (its other threads: {shown})" if shown else ""
    and_others = f", and {_describe_waiting(job, waiting, group)}" if waiting else ""
    did, is_error = f"{agree(does, len(group))}{call}{place}{threads}", False
    if where.waits_for_the_dead and (lost := describe_lost([job.ranks[rank] for rank in group], now=job.time)):
        advice, is_error = _advise_on_lost(where), where.has_lost
        did = f"{did}, but {lost}"
    brief = f"{job.names(group)} {did}"
    return DeadlockCause(f"{brief}{and_others}", advice, brief=brief, is_error=is_error)


def _advise_on_lost(state: RankState) -> str:
    if state.helpers.lost_workers:
        return _POOL_ADVICE
    if state.kept is not None and not state.helpers.any_dead:
        return _FUTURE_ADVICE
    return _DEAD_ADVICE if state.has_lost else _ALONE_ADVICE


def _not_compiling(job: _JobState, group: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that this group's compilers wait for: ranks of the program's GPUs that are not compiling.

    Empty if a rank compiles for its own devices, or if its recorder does not say what it compiles.
    """
    if job.platform != "gpu":
        return ()
    flights = [job.flights[rank] for rank in group if rank in job.flights]
    needed = (parse_group(flight.compiling_ranks, len(job.hosts)) for flight in flights)
    return tuple(sorted(frozenset().union(*needed).difference(job.doing(Activity.COMPILING))))


def _is_compiling_known(job: _JobState, group: tuple[int, ...]) -> bool:
    """Whether recorders show for which devices the programs are compiled, if that matters."""
    return job.platform != "gpu" or all(rank in job.flights and job.flights[rank].compiling for rank in group)


def _describe_ending(job: _JobState, group: tuple[int, ...], ending: Ending, waiting: tuple[int, ...]) -> DeadlockCause:
    """Describe ranks whose program has ended: `rank 0 is at its end, but is still in its exit handler t.py:5 flush`."""
    where = job.ranks[group[0]]
    does, advice = _ENDINGS[ending]
    shown = _list(where.other_threads) if ending is Ending.THREADS else ""
    if ending is Ending.CHILDREN:
        children = [child for rank in group for child in job.ranks[rank].helpers.live_children]
        shown = _list(_unique(f"process {one.pid}{f' ({one.command})' if one.command else ''}" for one in children))
    place = f" {where.place}" if where.place else f": {shown}" if shown else ""
    and_others = f", and {_describe_waiting(job, waiting, group)}" if waiting else ""
    brief = f"{job.names(group)} {agree('is at its end', len(group))}, but {agree(does, len(group))}{place}"
    return DeadlockCause(f"{brief}{and_others}", advice, brief=brief)


def _describe_lone_waiter(job: _JobState, waiting: tuple[int, ...], others: tuple[int, ...]) -> DeadlockCause:
    """Describe one rank that waits in a call that no other rank is about to make."""
    places = _unique(job.ranks[rank].place for rank in others)
    where = f" {agree('is', len(others))} elsewhere ({_list(places)})" if others and places else ""
    fates = [f"{job.names(others)}{where}"] if where else []
    if job.finished:
        fates.append(f"{job.names(job.finished)} {job.end_of(job.finished)}")
    return DeadlockCause(
        f"only {job.names(waiting)} waits {_describe_place(job.ranks[waiting[0]])}; {' and '.join(fates)}",
        "every rank must make this call; is it under an `if` that only this rank enters?",
    )


def _left_by_the_finished(job: _JobState, waiting: tuple[int, ...]) -> Iterator[DeadlockCause]:
    if len(waiting) == 1 and len(job.finished) > 1:
        yield _describe_lone_waiter(job, waiting, ())
        return
    has_raised = all(rank in job.raised for rank in job.finished)
    yield DeadlockCause(
        f"{job.names(job.finished)} {job.end_of(job.finished)}, and {_describe_waiting(job, waiting, job.finished)}",
        "" if has_raised else f"{SAME_STEPS}; does one of them have less data, or return early?",
        advises_same_steps=not has_raised,
    )


def _waiting_apart(job: _JobState, waiting: tuple[int, ...]) -> Iterator[DeadlockCause]:
    """Yield the causes if all ranks wait in JAX or for other ranks, but not at the same place."""
    groups = sorted(_group(job, waiting), key=lambda group: (len(group), group))
    states = [job.ranks[group[0]] for group in groups]
    kinds = {state.activity for state in states}
    is_certain = len(kinds) > 1 or all(job.ranks[rank].is_certain for rank in waiting)
    if is_certain and len(groups) <= _MAX_GROUPS and len({(state.place, state.wait) for state in states}) > 1:
        parts = [
            f"{job.names(group)} {agree('waits', len(group))} {_describe_place(state)}"
            for group, state in zip(groups, states, strict=True)
        ]
        yield DeadlockCause(_list(parts), "every rank must make the same calls in the same order")


def _group(job: _JobState, ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Group ranks that do the same at the same place."""
    states = {rank: job.ranks[rank] for rank in ranks}
    kinds = {
        r: (s.activity, s.place, s.call, s.wait, s.ending, describe_lost([s], pid=False)) for r, s in states.items()
    }
    return [alike for _, alike in group_alike(kinds)]


def _describe_waiting(job: _JobState, waiting: tuple[int, ...], for_whom: Sequence[int]) -> str:
    """Write `ranks 0-2 wait for it in JAX (train.py:88 train_step)`."""
    it = "it" if len(for_whom) == 1 else "them"
    told = f"{format_ranks(waiting)} {agree('waits', len(waiting))} for {it}"
    if len(_group(job, waiting)) > 1:
        return f"{told} at {_list(_unique(job.ranks[rank].place for rank in waiting))}"
    return f"{told} {_describe_place(job.ranks[waiting[0]])}"


def _describe_place(where: RankState) -> str:
    """Write where a rank waits: `in a barrier (sync_global_devices at train.py:40 save)`."""
    if not where.is_certain:
        return f"at {where.place}"
    if where.activity is Activity.JOINT_CALL:
        return f"in {where.call} ({where.place})"
    call = f"{where.call} at {where.place}" if where.call else where.place
    if where.wait is not None and (where.call or where.thread):
        via = f", in its thread {where.thread}" if where.thread else ""
        return f"{describe_wait(where.wait)} ({call}{via})"
    if where.wait is not None:
        return f"{describe_wait(where.wait)} at {where.place}"
    return f"in {'a barrier' if where.activity is Activity.BARRIER else 'JAX'} ({call})"


def _unique(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _list(parts: Sequence[str]) -> str:
    """Write `a`, `a and b`, `a, b and c`, or `a, b, c and 2 more`."""
    shown = list(parts[:3]) + ([f"{len(parts) - 3} more"] if len(parts) > 3 else [])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else ""
