"""Finds out what a rank is doing, from its stack and from the kernel function in which its main thread sleeps.

Python frames decide first, because they are the same everywhere. Where the program's own line is the innermost frame,
as in input() or time.sleep(), the kernel function decides.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from jaxrun import stack_frames
from jaxrun.analysis.diagnosis import stacks
from jaxrun.analysis.diagnosis.error_choice import (
    ErrorChoice,
    HandledError,
    choose_error,
    find_failed_save,
    find_handled_errors,
)
from jaxrun.analysis.diagnosis.helpers import NO_HELPERS, Helpers
from jaxrun.analysis.diagnosis.stacks import Ending, Frame, Stack
from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.protocol.error_chain import GET_KEY, GET_KEY_BYTES, CoordinationWait
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.query_messages import ProcessState


class Activity(enum.Enum):
    STOPPED = enum.auto()
    TRACED = enum.auto()  # stopped by a debugger from outside
    DISK = enum.auto()
    PROMPT = enum.auto()  # waits at a debugger's prompt
    INPUT = enum.auto()
    FILE_LOCK = enum.auto()
    PROCESS = enum.auto()  # waits for a process that it started
    NETWORK = enum.auto()
    DATA = enum.auto()
    THREAD = enum.auto()  # waits for another thread of its own process: a lock, an event, a future
    EVENTS = enum.auto()  # waits in an event loop of asyncio
    ENDING = enum.auto()  # the program's main thread has ended, but something else in the process has not
    SLEEP = enum.auto()
    COMPILING = enum.auto()
    BARRIER = enum.auto()
    KEY = enum.auto()  # waits for a value that another rank gives to JAX's coordination service
    CALL = enum.auto()  # waits in JAX, usually for other ranks
    JOINT_CALL = enum.auto()  # waits for other ranks in a function of jaxrun
    ASLEEP = enum.auto()  # waits on a futex at a line that has made no cross-process call before
    ELSEWHERE = enum.auto()
    IDLE = enum.auto()  # a gang's rank between two calls
    UNKNOWN = enum.auto()


class ActivityWords(NamedTuple):
    """What a rank does, to complete "rank 3 …"; `brief` has room in a column, without "is"."""

    full: str
    brief: str = ""


ACTIVITY_WORDS: Mapping[Activity, ActivityWords] = {
    Activity.STOPPED: ActivityWords("is stopped by a signal", "stopped by a signal"),
    Activity.TRACED: ActivityWords("is stopped by a debugger", "stopped by a debugger"),
    Activity.DISK: ActivityWords("waits in the kernel for a disk, a file server or a driver", "waits for a disk"),
    Activity.PROMPT: ActivityWords("waits at a debugger's prompt"),
    Activity.INPUT: ActivityWords("waits for something to read, as in input(),", "waits for input"),
    Activity.FILE_LOCK: ActivityWords("waits for a file lock", "waits for a file lock"),
    Activity.PROCESS: ActivityWords("waits for a process that it started", "waits for a process"),
    Activity.NETWORK: ActivityWords("waits for the network", "waits for the network"),
    Activity.DATA: ActivityWords("waits for data"),
    Activity.THREAD: ActivityWords("waits for a lock or another of its threads"),
    Activity.EVENTS: ActivityWords("waits in its event loop"),
    Activity.ENDING: ActivityWords("is at its end"),
    Activity.SLEEP: ActivityWords("sleeps", "sleeps"),
    Activity.COMPILING: ActivityWords("is compiling", "compiles"),
    Activity.ASLEEP: ActivityWords("is asleep where it has made no cross-process call before,", "waits"),
}
IN_JAX = (Activity.BARRIER, Activity.KEY, Activity.CALL)
WAITING = (*IN_JAX, Activity.JOINT_CALL)  # these usually wait for other ranks


class RankState(Struct, frozen=True):
    """What one rank is doing; every field except `activity` may be empty.

    place:          the program's line, "data.py:31 __next__"
    call:           the function that it has called there, "queue.get"
    other_threads:  where the program's other threads are
    is_certain:     False for a CALL that is only inferred: there are no frames of JAX, and no call was seen there
    ending:         what the rank waits for, if it is ENDING
    helpers:        the threads and processes that it has started
    is_alone:       it waits for data, but has no other thread and no child
    is_in_jax:      its main thread is in JAX, asleep or not, or waits for ranks in a joint function; not at a prompt
    sleeps_in_jax:  `is_in_jax`, and the main thread is asleep
    wait:           its call of JAX's coordination service, if it is in one
    thread:         the thread that is in this call, and for which the main thread waits; empty for the main thread
    errors:         the exceptions that its threads handle
    kept:           the exception of a future, for which the program has not asked
    """

    activity: Activity
    place: str = ""
    call: str = ""
    other_threads: tuple[str, ...] = ()
    is_certain: bool = True
    ending: Ending | None = None
    helpers: Helpers = NO_HELPERS
    is_alone: bool = False
    is_in_jax: bool = False
    sleeps_in_jax: bool = False
    wait: CoordinationWait | None = None
    thread: str = ""
    errors: tuple[HandledError, ...] = ()
    kept: ErrorChoice | None = None

    @property
    def waits_for_the_dead(self) -> bool:
        """Whether it waits for data that a task, thread or process may have had to bring, which has ended."""
        return self.activity in (Activity.DATA, Activity.THREAD, Activity.EVENTS) and (self.has_lost or self.is_alone)

    @property
    def has_lost(self) -> bool:
        """Whether a task, thread or process of it is known to have failed or ended."""
        return self.helpers.any_dead or self.kept is not None


_PYTHON = r"/lib(?:64)?/python3\.\d+/"
_PACKAGE = r"-packages/"
_DATA_LOADERS = "torch/utils/data|grain|tensorflow/python/data|tensorflow_datasets|datasets"
_QUEUES = r"multiprocessing/(?:queues|pool|connection)\.py"
_POOL = lazy_pattern(r"/multiprocess(?:ing)?/pool\.py$")
_CLIENTS = "requests|urllib3|httpx|httpcore|aiohttp|fsspec|gcsfs|s3fs|botocore|grpc|google|wandb"
# What a rank does if any of its frames ("file function") matches; the first rule that matches decides.
_RULES = tuple(
    (activity, name, lazy_pattern(pattern))
    for activity, name, pattern in (
        (Activity.CALL, "", r"/jaxrun_runtime/agent_channel\.py receive_answer$"),  # for its turn (--lockstep strict)
        (Activity.PROMPT, "jax.debug.breakpoint", r"/jax/_src/debugger/"),
        (Activity.PROMPT, "ipdb", rf"{_PACKAGE}(?:ipdb|IPython/core/debugger\.py)"),
        (Activity.PROMPT, "IPython", rf"{_PACKAGE}IPython/terminal/"),
        (Activity.PROMPT, "debugpy", rf"{_PACKAGE}(?:debugpy|pydevd)"),
        (Activity.PROMPT, "pudb", rf"{_PACKAGE}pudb/"),
        (Activity.PROMPT, "pdb", rf"{_PYTHON}(?:pdb|bdb)\.py"),
        (Activity.INPUT, "", rf"{_PYTHON}(?:(?:cmd|code)\.py (?:cmdloop|interact|raw_input)$|getpass\.py)"),
        (Activity.COMPILING, "", r"/jax/_src/compiler\.py (?:backend_compile|compile_or_get_cached)"),
        (Activity.BARRIER, "sync_global_devices", r"/jax/experimental/multihost_utils\.py sync_global_devices$"),
        (Activity.BARRIER, "", rf"{_PACKAGE}.* (?:sync_global_\w+|\w*barrier\w*)$"),
        (Activity.DATA, "", rf"{_PACKAGE}(?:{_DATA_LOADERS})/"),
        (Activity.FILE_LOCK, "", rf"{_PACKAGE}(?:filelock|portalocker|fasteners)/"),
        (Activity.PROCESS, "", rf"{_PYTHON}(?:subprocess\.py|multiprocessing/(?:popen_\w+|process)\.py)"),
        (Activity.DATA, "", rf"{_PYTHON}(?:queue\.py (?:get|put|join)$|{_QUEUES})"),
        (Activity.NETWORK, "", rf"{_PACKAGE}(?:{_CLIENTS})/"),
        (Activity.NETWORK, "", rf"{_PYTHON}(?:socket\.py|ssl\.py|http/client\.py|urllib/|ftplib\.py)"),
        (Activity.EVENTS, "", rf"{_PYTHON}(?:asyncio/base_events\.py _run_once$|selectors\.py select$)"),
        (Activity.THREAD, "", rf"{_PYTHON}(?:concurrent/futures/|threading\.py (?:wait|acquire|join|__enter__)$)"),
    )
)
_STATES: Mapping[str, Activity] = {
    ProcessState.STOPPED: Activity.STOPPED,
    ProcessState.TRACED: Activity.TRACED,
    ProcessState.DISK: Activity.DISK,
}
# Kernel functions, of old and new kernels, in which a thread sleeps whose innermost frame is the program's.
_READS = lazy_pattern(r"n_tty_read|tty_read|wait_woken|pipe_read|pipe_wait|unix_stream_(?:read|data)")
_KERNEL = tuple(
    (activity, lazy_pattern(pattern))
    for activity, pattern in (
        (Activity.SLEEP, r"nanosleep"),
        (Activity.PROCESS, r"^(?:kernel_)?(?:do_)?wait(?:id|4)?$"),
        (Activity.FILE_LOCK, r"lock_inode|locks_lock|flock|posix_lock"),
        (Activity.NETWORK, r"inet_|tcp_|sk_wait|wait_for_connect|unix_wait"),
    )
)
# Functions in which JAX waits for a result, possibly by polling a GPU.
_RESULT = lazy_pattern(r"/jax/_src/(?:api\.py (?:try_to_block|block_until_ready)|array\.py (?:_value|__array__))$")
_INNER = lazy_pattern(r"^_|^(?:wrapper|cache_miss|try_to_block)$")  # JAX's internals, whose names tell a user nothing


def find_rank_states(
    dumps: Mapping[int, str],
    waits: Mapping[int, str],
    flights: Mapping[int, Flight],
    helpers: Mapping[int, Helpers] | None = None,
) -> dict[int, RankState]:
    """Return what each rank of `dumps` is doing; the flights say where it has made cross-process calls before."""
    places = {rank: flight.places for rank, flight in flights.items()}
    found = {r: find_rank_state(r, dumps[r], waits.get(r, ""), places.get(r, ())) for r in sorted(dumps)}
    if helpers is None:  # helpers were not asked for
        return found
    return {rank: _with_helpers(state, dumps[rank], helpers.get(rank, NO_HELPERS)) for rank, state in found.items()}


def _with_helpers(state: RankState, dump: str, helpers: Helpers) -> RankState:
    main = stacks.main_stack(dump)
    if not any(_POOL.search(frame.file) for frame in main.frames):
        helpers = replace(helpers, lost_workers=())  # it does not wait for a pool
    is_alone = False
    if state.activity is Activity.DATA and state.call == "queue.get":
        others = [stack for stack in stacks.parse_dump(dump) if stack != main]
        has_threads = any(not frame.is_scaffold for stack in others for frame in stack.frames)  # but jaxrun's own
        is_alone = not (helpers.live_children or helpers.any_dead or has_threads)
    left = find_failed_save(helpers.failed_saves)
    errors = state.errors if state.errors or left is None else (left,)
    return replace(state, helpers=helpers, is_alone=is_alone, errors=errors)


def find_rank_state(rank: int, dump: str, wait: str, places: Collection[str] = ()) -> RankState:
    """Return what `rank` is doing.

    wait:    the kernel function in which its main thread sleeps, or its process state
    places:  program lines at which it has made cross-process calls ("train.py:88 train_step"); empty if unknown
    """
    stack = stacks.main_stack(dump)
    state = _find_state(rank, dump, stack, wait, places)
    is_in_jax = state.activity is not Activity.PROMPT and stack.is_in_jax(places)
    is_noted = stack.waits_for_ranks or stack.coordination_wait is not None
    sleeps = is_in_jax and (is_noted or "futex" in wait)
    errors, kept = find_handled_errors(dump), choose_error(stack.notes.kept)
    return replace(state, is_in_jax=is_in_jax, sleeps_in_jax=sleeps, errors=errors, kept=kept)


def _find_state(rank: int, dump: str, stack: Stack, wait: str, places: Collection[str]) -> RankState:
    if (activity := _STATES.get(wait)) is not None:
        return RankState(activity)
    if not stack.frames:
        return RankState(Activity.UNKNOWN)
    if stack.is_idle:
        return RankState(Activity.IDLE)
    if (ending := stack.ending) is not None:
        threads = _awaited_threads(dump, stack) if ending is Ending.THREADS else ()
        frame = stack.ending_frame if ending in (Ending.HANDLER, Ending.FINALIZER) else None
        return RankState(Activity.ENDING, str(frame or ""), other_threads=threads, ending=ending)
    index = _program_frame(stack)
    called, place = stack.frames[:index], str(stack.frames[index])
    if stack.waits_for_ranks:
        return RankState(Activity.JOINT_CALL, place, stack.joint_function)
    if (coordination := stack.coordination_wait) is not None:
        return RankState(_kind(coordination), place, _name(called), wait=coordination)
    for activity, name, pattern in _RULES:
        if any(pattern.search(f"{frame.file} {frame.function}") for frame in called):
            others = _others(dump, stack) if activity in (Activity.THREAD, Activity.DATA) else ()
            if activity is Activity.THREAD and (helper := _waiting_thread(dump, stack)):
                return replace(helper, place=place, call=_name(called))
            return RankState(activity, place, name or _name(called), others)
    if any(frame.is_jax for frame in called):
        waits = "futex" in wait or _RESULT.search(f"{called[0].file} {called[0].function}")
        return RankState(Activity.CALL if waits else Activity.ELSEWHERE, place, _name(called))
    if called:
        if "futex" in wait and stack.is_in_wrapper(places):
            return RankState(Activity.CALL, place)
        return RankState(Activity.ELSEWHERE, place, _name(called))
    activity = find_kernel_activity(rank, wait, known=not places or place in places)
    return RankState(activity, place, is_certain=activity is not Activity.CALL or place in places)


def find_kernel_activity(rank: int, wait: str, *, known: bool = False) -> Activity:
    """Return what `rank` waits in, by the kernel's function; `known`: it may have made cross-process calls there."""
    if (activity := _STATES.get(wait)) is not None:
        return activity
    if "futex" in wait:
        return Activity.CALL if known else Activity.ASLEEP
    if rank == 0 and _READS.search(wait):  # no other rank has a stdin
        return Activity.INPUT
    return next((activity for activity, pattern in _KERNEL if pattern.search(wait)), Activity.ELSEWHERE)


def _program_frame(stack: Stack) -> int:
    """The index of the program's innermost frame, or of a library's innermost frame if the program has none.

    A library counts that is not JAX, and about which no rule says what a rank does in it.
    """
    if stack.programs:
        return stack.frames.index(stack.programs[0])
    for index, frame in enumerate(stack.frames):
        is_library = _PACKAGE in frame.file and not frame.is_jax and not frame.is_scaffold
        if is_library and not any(rule.search(f"{frame.file} {frame.function}") for _, _, rule in _RULES):
            return index
    return 0


def _name(called: Sequence[Frame]) -> str:
    """The function that the program has called: "queue.get", "process_allgather"; empty for internals of JAX."""
    entries = [frame for frame in called if not (frame.is_wrapper or stack_frames.is_ours(frame.file))]
    if not entries or (entries[-1].is_jax and _INNER.search(entries[-1].function)):
        return ""
    entry = entries[-1]
    if entry.is_jax:
        return entry.function
    library = re.split(rf"{_PACKAGE}|{_PYTHON}", entry.file)[-1].split("/")[0].removesuffix(".py")
    return library if _INNER.search(entry.function) else f"{library}.{entry.function}"


def _kind(wait: CoordinationWait) -> Activity:
    return Activity.KEY if wait.function in (GET_KEY, GET_KEY_BYTES) else Activity.BARRIER


def _waiting_thread(dump: str, main: Stack) -> RankState | None:
    """What a rank does whose main thread waits for another thread, and that one for ranks; None if none does."""
    for stack in stacks.parse_dump(dump):
        if stack != main and (wait := stack.coordination_wait) is not None:
            return RankState(_kind(wait), wait=wait, thread=stack.name or "without a name")
    return None


def _awaited_threads(dump: str, main: Stack) -> tuple[str, ...]:
    """The threads that Python waits for at exit: `Loader at data.py:75 loader`."""
    threads = [stack for stack in stacks.parse_dump(dump) if stack != main and not stack.is_daemon]
    shown = [(stack.name, stack.users[0]) for stack in threads if any(not frame.is_scaffold for frame in stack.frames)]
    return tuple(dict.fromkeys(f"{name} at {frame}" if name else str(frame) for name, frame in shown))


def _others(dump: str, main: Stack) -> tuple[str, ...]:
    """The places of the program's other threads, without duplicates."""
    threads = (stack for stack in stacks.parse_dump(dump) if stack != main)
    return tuple(dict.fromkeys(str(stack.programs[0]) for stack in threads if stack.programs))
