"""Describes where the ranks are: in groups of ranks at the same place, frame by frame, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from jaxrun.analysis.diagnosis.error_choice import find_handled_errors
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import ACTIVITY_WORDS, Activity
from jaxrun.analysis.diagnosis.stacks import Ending, Frame, Stack, crashed_stack, main_stack
from jaxrun.analysis.lockstep.progress import format_progress
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.analysis.verdict.deadlocks import explain_deadlock
from jaxrun.analysis.verdict.error_text import format_error, format_frames
from jaxrun.analysis.verdict.nccl_text import describe_nccl
from jaxrun.protocol.flight import parse_group
from jaxrun.protocol.query_messages import ProcessState
from jaxrun.stack_frames import is_ours
from jaxrun.terminal import wrap_prose
from jaxrun.text import (
    agree,
    format_columns,
    format_ranges,
    format_ranks,
    format_ranks_on_hosts,
    group_alike,
    has_several_hosts,
    plural,
)

_IDLE = "idle: it has {}, and waits for the next call"
_ENDINGS = {
    Ending.THREADS: "the end of the program, waits for its threads",
    Ending.CHILDREN: "the end of the program, waits for its child processes",
    Ending.QUEUE: "the end of the program, waits for the thread of a multiprocessing.Queue",
    Ending.HANDLER: "the end of the program, in the exit handler {}",
    Ending.FINALIZER: "the end of the program, in a finalizer, {}",
    Ending.MPI: "the end of the program, in MPI_Finalize",
}
_MAX_GROUPS = 3  # mentioned in one line
_DEAF = "it blocks signals, or is about to end"
_STATES = {
    ProcessState.STOPPED: f"{ACTIVITY_WORDS[Activity.STOPPED].brief} (SIGCONT resumes it)",
    ProcessState.TRACED: ACTIVITY_WORDS[Activity.TRACED].brief,
    ProcessState.ENDED: "dead, and about to be noticed",
    ProcessState.DISK: f"it {ACTIVITY_WORDS[Activity.DISK].full} (state D)",
}


class Place(Struct, frozen=True):
    """Where a thread is.

    line:    `data.py:31 __next__ <- train.py:84 main`: its line, and the line that called it
    inside:  what it has called there, `queue: get`; may be empty
    silent:  why the place is unknown; empty if it is known
    """

    line: str = ""
    inside: str = ""
    silent: str = ""

    def format(self, separator: str = "   ") -> str:
        """Write `data.py:31 __next__ <- train.py:84 main   in queue: get`."""
        if self.silent:
            return f"no answer: {self.silent}"
        return f"{self.line}{separator}in {self.inside}" if self.inside else self.line


def describe_stacks(stacks: JobStacks, *, is_told: bool = False) -> str:
    """Write who waits for whom, which ranks are where, and who slows the job down; empty if no rank has stacks.

    is_told:  a headline has said who waits for whom, so only the advice about it is left
    """
    places = format_places(stacks)
    if not places:
        return ""
    causes = explain_deadlock(stacks)
    explanations = [causes[0].advice, *map(str, causes[1:])] if is_told and causes else map(str, causes)
    sentences = filter(None, [*explanations, *describe_nccl(stacks.nccl, stacks.hosts)])
    slow = [f"{format_straggler(stacks.straggler, stacks.hosts)}."] if stacks.straggler is not None else []
    return "\n".join([*map(wrap_prose, sentences), places, *map(wrap_prose, slow)])


def format_places(stacks: JobStacks) -> str:
    """Write which ranks are where, and how many calls each has made; empty if no rank has stacks."""
    flights = stacks.flights

    def calls(ranks: Iterable[int]) -> str:
        known = {rank: flights[rank] for rank in ranks if rank in flights}
        return format_progress(known, len(stacks.hosts), stacks.time)

    is_explained = bool(explain_deadlock(stacks))
    groups = format_groups(
        stacks.dumps, stacks.hosts, stacks.waits, calls, stacks.raised, names_outliers=not is_explained
    )
    if not groups or not stacks.finished:
        return groups
    have, made = agree("has", len(stacks.finished)), calls(stacks.finished)
    who = format_ranks_on_hosts(stacks.finished, stacks.hosts)
    return f"{groups}\n{who} {have} finished{f', {made}' if made else ''}."


def describe_stall(stacks: JobStacks) -> str:
    """Write `rank 1 sleeps at train.py:9 main, and rank 0 waits for it in JAX (…)`, or else where the ranks are."""
    explanations = explain_deadlock(stacks)
    what = explanations[0].what if explanations else _list_places(stacks)
    if stacks.nccl is not None and stacks.nccl.differing:
        what += f"; {describe_nccl(stacks.nccl, stacks.hosts)[0].removesuffix('.')}"
    return what


def format_stall_notice(
    stacks: JobStacks, idle_s: float, run_dir: Path | None, *, limit_s: float = 0.0, is_as_before: bool = False
) -> str:
    """Write `no progress for 30 s: rank 1 sleeps at train.py:9 main, and rank 0 waits for it in JAX (…) · more: …`.

    run_dir:       as people may type it; None if there is no run directory
    limit_s:       --stall-timeout, if this is the time to mention it; else 0
    is_as_before:  the last notice has told who waits for whom
    """
    finding = ", as before" if is_as_before else f": {describe_stall(stacks)}"
    limit = f"; the job is stopped after {limit_s:g} s of it (--stall-timeout)" if limit_s else ""
    more = f"jaxrun stacks {run_dir}" if run_dir else "Ctrl-\\ (SIGQUIT)"
    return f"no progress for {idle_s:.0f} s{finding}{limit} · more: {more}"


def format_straggler(straggler: Straggler, hosts: Mapping[int, str]) -> str:
    """Write `rank 5 (h3) came last to 94 % of calls, by 38 ms on average: the others waited 31 % of the time; …`."""
    group = parse_group(straggler.group, len(hosts))
    others = sorted(group.difference(straggler.ranks))
    calls = f"the calls at {straggler.place.partition(' ')[0]}" if straggler.place else "calls"
    of_group = f" of ranks {format_ranges(group)}" if len(group) < len(hosts) else ""
    who = f"rank {others[0]}" if len(others) == 1 else "the others"
    where = f"; it was in {straggler.frame}" if straggler.frame else ""
    late = f"{_percent(straggler.last)} of {calls}{of_group}, by {_milliseconds(straggler.late_s)} on average"
    waited = f"{who} waited {_percent(straggler.share)} of the time"
    return f"{format_ranks_on_hosts(straggler.ranks, hosts)} came last to {late}: {waited}{where}"


def format_groups(
    dumps: Mapping[int, str],
    hosts: Mapping[int, str],
    waits: Mapping[int, str],
    calls: Callable[[Iterable[int]], str] = lambda _: "",
    raised: Mapping[int, str] | None = None,
    *,
    names_outliers: bool = True,
) -> str:
    """Write one line for each place of ranks, the most common first, and which ranks differ; empty without dumps.

    `calls` writes how many calls ranks have made. `waits` has the kernel's state of ranks whose dump is empty, `raised`
    the error that a gang's call has raised on ranks.
    """
    groups = group_by_place(dumps, waits, raised or {})
    rows = [(plural(len(ranks), "rank"), _names(ranks, hosts), place.format(), calls(ranks)) for place, ranks in groups]
    if not rows:
        return ""
    lines = [f"  {line}" for line in format_columns(rows)]
    heading = f"{plural(len(dumps), 'rank')}, {plural(len(groups), 'group')}"
    return "\n".join([heading, *lines, *(_outliers([ranks for _, ranks in groups]) if names_outliers else ())])


def group_by_place(
    dumps: Mapping[int, str], waits: Mapping[int, str], raised: Mapping[int, str]
) -> list[tuple[Place, tuple[int, ...]]]:
    """Return each place at which ranks are, with these ranks, the most common place first."""

    def place(rank: int) -> Place:
        state = waits.get(rank, "")
        silent = next((text for known, text in _STATES.items() if state == known), _DEAF)
        return find_place(main_stack(dumps[rank]), raised.get(rank, "")) if dumps[rank] else Place(silent=silent)

    return group_alike({rank: place(rank) for rank in dumps})


def find_place(stack: Stack, raised: str = "") -> Place:
    """Return where a stack is; `raised`: the error that the last call of a gang has raised there."""
    users = stack.users
    if not users:
        return Place(silent=_DEAF)
    if stack.is_idle:
        return Place(_IDLE.format(f"raised {raised}" if raised else "returned"))
    if (ending := stack.ending) is not None:
        return Place(_ENDINGS[ending].format(stack.ending_frame))
    caller = next((frame for frame in users if frame.file != users[0].file), None)
    line = f"{users[0]} <- {caller}" if caller else str(users[0])
    if not stack.called:
        return Place(line)
    if stack.joint_function:
        return Place(line, stack.joint_function)
    if (wait := stack.coordination_wait) is not None:
        return Place(line, f"JAX: {wait.function}{f' {wait.name!r}' if wait.name else ''}")
    theirs = [frame for frame in stack.called if not is_ours(frame.file)] or stack.called
    entry = next((frame for frame in reversed(theirs) if not frame.is_wrapper), theirs[-1])
    return Place(line, f"{'JAX' if entry.is_jax else entry.library}: {entry.function}")


def format_all_frames(dumps: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """Write all frames of the main threads, innermost last, once for each group of ranks with the same frames."""
    texts = {rank: "\n".join(_lines_in_full(dump)) or "  no frames" for rank, dump in dumps.items()}
    return format_by_text(texts, hosts)


def _lines_in_full(dump: str) -> Iterator[str]:
    """Yield the frames of a main thread, and the exceptions that it and other threads handle, with their frames."""
    yield from _frame_lines(main_stack(dump))
    for handled in find_handled_errors(dump):
        thread = f"its thread {handled.thread}" if handled.thread else "it"
        yield f"  {thread} handles {format_error(handled.choice.chosen)}"
        yield from (f"  {line}" for line in format_frames(handled.choice.chosen).splitlines()[1:-1])


def format_by_text(texts: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """Write the ranks' texts, each below the ranks that have it, the most common first."""
    groups = group_alike(texts)
    return "\n\n".join(f"{format_ranks_on_hosts(ranks, hosts)}:\n{text}" for text, ranks in groups)


def format_crash(dump: str) -> str:
    """Format the crashed thread in a fatal signal's dump like a traceback; empty if there is no frame."""
    lines = _frame_lines(crashed_stack(dump))
    return "\n".join(["Stack (most recent call last):", *lines]) if lines else ""


def _frame_lines(stack: Stack) -> list[str]:
    frames: Iterable[Frame] = [frame for frame in stack.frames if not frame.is_scaffold] or stack.frames
    return [f'  File "{f.file}", line {f.line}, in {f.function}' for f in reversed(list(frames))]


def _outliers(groups: Sequence[Sequence[int]]) -> Iterator[str]:
    odd = [rank for ranks in groups[1:] for rank in ranks]
    if odd and len(odd) < len(groups[0]):
        yield f"{format_ranks(odd)} {'is the one that differs' if len(odd) == 1 else 'differ from the rest'}."


def _names(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    where = {hosts[rank] for rank in ranks}
    return format_ranges(ranks) + (f" ({where.pop()})" if has_several_hosts(hosts) and len(where) == 1 else "")


def _list_places(stacks: JobStacks) -> str:
    """Write `ranks 0-2 are at train.py:88 step, in JAX: block_until_ready; rank 3 is at data.py:31 load`."""
    groups = group_by_place(stacks.dumps, stacks.waits, stacks.raised)
    shown = [_describe_group(ranks, place, stacks) for place, ranks in groups[:_MAX_GROUPS]]
    left = [f"{len(groups) - _MAX_GROUPS} more groups elsewhere"] if len(groups) > _MAX_GROUPS else []
    return "; ".join([*shown, *left])


def _describe_group(ranks: Sequence[int], place: Place, stacks: JobStacks) -> str:
    who = format_ranks_on_hosts(ranks, stacks.hosts)
    if place.silent:
        return f"{who} {'gives' if len(ranks) == 1 else 'give'} {place.format()}"
    return f"{who} {agree('is', len(ranks))} at {place.format(', ')}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
