"""The common deadlocks, each in a sentence of its own: what, who, where, and what to do. No I/O.

A look at a job that is well may show the same for a moment. So the sentences say what is, and accuse nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrun.text import format_ranks, format_ranks_on_hosts
from jaxrun.verdict.rank_state import Activity, RankState, find_rank_state

_MAX_SENTENCES = 2  # sentences
_OTHERS_SHOWN = 2
_WAITING = (Activity.BARRIER, Activity.CALL)
# What the others may wait for, of one rank, and what to do. The most telling comes first.
_CAUSES: Mapping[Activity, tuple[str, str]] = {
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
_OF_MANY = {"is": "are", "has": "have", "waits": "wait", "sleeps": "sleep", "it": "they", "its": "their"}
_BY_ITSELF = (
    Activity.STOPPED,
    Activity.TRACED,
    Activity.PROMPT,
    Activity.INPUT,
)  # tells something even if nobody waits for it
_PASSING = (Activity.SLEEP, Activity.ASLEEP)  # tells nothing if nobody waits for it


@dataclass(frozen=True, slots=True)
class _JobState:
    """What each rank does that has not finished, and who has finished."""

    ranks: Mapping[int, RankState]
    hosts: Mapping[int, str]
    finished: tuple[int, ...]

    def doing(self, *kinds: Activity) -> tuple[int, ...]:
        return tuple(rank for rank, where in self.ranks.items() if where.activity in kinds)

    def names(self, ranks: Iterable[int]) -> str:
        return format_ranks_on_hosts(ranks, self.hosts)


def explain_deadlock(
    dumps: Mapping[int, str],
    waits: Mapping[int, str],
    hosts: Mapping[int, str],
    finished: Collection[int] = (),
    places: Mapping[int, Sequence[str]] | None = None,
) -> tuple[str, ...]:
    """At most two sentences on why the job does not go on; none where nothing is certain enough.

    By rank: what its fault handler wrote, what the kernel says that its main thread waits in, its host, and where it
    has made cross-process calls before ("train.py:88 train_step"; missing or empty where that is not known).
    `finished`: the ranks whose program has ended.
    """
    known = places or {}
    seen = {
        rank: find_rank_state(rank, dumps[rank], waits.get(rank, ""), known.get(rank, ())) for rank in sorted(dumps)
    }
    idle = {rank for rank, where in seen.items() if where.activity is Activity.IDLE}
    ended = tuple(sorted((set(finished) - set(dumps)) | idle))
    scene = _JobState({rank: where for rank, where in seen.items() if rank not in idle}, hosts, ended)
    waiting = scene.doing(*_WAITING)
    if waiting and len(waiting) == len(scene.ranks):
        sentences = _left_by_the_finished(scene, waiting) if scene.finished else _apart(scene, waiting)
    else:
        sentences = _causes(scene, waiting)
    return tuple(sentences)[:_MAX_SENTENCES]


def _causes(scene: _JobState, waiting: tuple[int, ...]) -> Iterator[str]:
    """Some do something else than to wait in JAX."""
    others = tuple(rank for rank in scene.ranks if rank not in waiting)
    groups = sorted(_alike(scene, others), key=lambda group: (_weight(scene, group), len(group), group))
    explained = [group for group in groups if _is_telling(scene, group, waiting)]
    if len(waiting) == 1 and len(others) + len(scene.finished) > 1 and not _stands(scene, explained):
        yield _alone(scene, waiting, others)
        return
    for number, group in enumerate(explained):
        yield _cause(scene, group, waiting if number == 0 else ())
    elsewhere = scene.doing(Activity.ELSEWHERE)
    if waiting and not explained and elsewhere and len(elsewhere) == len(others):
        where = _list(_unique(scene.ranks[rank].place for rank in elsewhere))
        yield (
            f"{scene.names(elsewhere)} {_verb(elsewhere, 'is', 'are')} not in JAX but at {where}, and "
            f"{_wait(scene, waiting, elsewhere)}: is that slow, or an endless loop?"
        )


def _stands(scene: _JobState, groups: Sequence[tuple[int, ...]]) -> bool:
    """Whether one of these cannot go on by itself."""
    return any(scene.ranks[group[0]].activity not in _PASSING for group in groups)


def _is_telling(scene: _JobState, group: tuple[int, ...], waiting: tuple[int, ...]) -> bool:
    doing = scene.ranks[group[0]].activity
    if doing not in _CAUSES:
        return False
    if waiting or doing in _BY_ITSELF:
        return True
    # Nobody waits for it: then only if it is all that happens in the job.
    return doing not in _PASSING and all(where.activity in (doing, *_BY_ITSELF) for where in scene.ranks.values())


def _cause(scene: _JobState, group: tuple[int, ...], waiting: tuple[int, ...]) -> str:
    where = scene.ranks[group[0]]
    does, advice = _CAUSES[where.activity]
    call = f" ({where.call})" if where.call and where.activity is not Activity.COMPILING else ""
    place = f" at {where.place}" if where.place else ""
    shown = ", ".join(where.other_threads[:_OTHERS_SHOWN])
    threads = f" (its other threads: {shown})" if shown else ""
    and_others = f", and {_wait(scene, waiting, group)}" if waiting else ""
    if len(group) > 1:
        does = " ".join(_OF_MANY.get(word, word) for word in does.split(" "))
    did = f"{does}{call}{place}{threads}".rstrip(",")
    return f"{scene.names(group)} {did}{and_others}: {advice}"


def _alone(scene: _JobState, waiting: tuple[int, ...], others: tuple[int, ...]) -> str:
    """One rank waits, and none of several others is on its way there."""
    places = _unique(scene.ranks[rank].place for rank in others)
    where = f" {_verb(others, 'is', 'are')} elsewhere ({_list(places)})" if others and places else ""
    fates = [f"{scene.names(others)}{where}"] if where else []
    if scene.finished:
        fates.append(f"{scene.names(scene.finished)} {_verb(scene.finished, 'has', 'have')} finished")
    return (
        f"only {scene.names(waiting)} {_in(scene.ranks[waiting[0]])}; {' and '.join(fates)}: "
        "every rank must make this call; is it under an `if` that only this rank enters?"
    )


def _left_by_the_finished(scene: _JobState, waiting: tuple[int, ...]) -> Iterator[str]:
    if len(waiting) == 1 and len(scene.finished) > 1:
        yield _alone(scene, waiting, ())
        return
    has = _verb(scene.finished, "has", "have")
    yield (
        f"{scene.names(scene.finished)} {has} finished, and {_wait(scene, waiting, scene.finished)}: "
        "every rank must take part in the same steps; has one of them less data, or does it return early?"
    )


def _apart(scene: _JobState, waiting: tuple[int, ...]) -> Iterator[str]:
    """All wait in JAX, but not in the same place."""
    groups = sorted(_alike(scene, waiting), key=lambda group: (len(group), group))
    barriers = [group for group in groups if scene.ranks[group[0]].activity is Activity.BARRIER]
    if len(groups) < 2 or len({scene.ranks[group[0]].place for group in groups}) < 2:
        return
    if barriers and len(barriers) < len(groups):
        first = barriers[0]
        rest = tuple(rank for group in groups if group not in barriers for rank in group)
        at = _list(_unique(scene.ranks[rank].place for rank in rest))
        yield (
            f"{scene.names(first)} {_in(scene.ranks[first[0]], len(first) > 1)} that {format_ranks(rest)} "
            f"{_verb(rest, 'has', 'have')} not reached: {_verb(rest, 'it waits', 'they wait')} at {at}; "
            "every rank must pass the same barriers and calls in the same order"
        )
    elif len(groups) <= 3 and all(scene.ranks[rank].is_certain for rank in waiting):
        parts = (f"{scene.names(group)} {_in(scene.ranks[group[0]], len(group) > 1)}" for group in groups)
        yield f"{_list(list(parts))}: every rank must make the same calls in the same order"


def _alike(scene: _JobState, ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Those that do the same at the same place."""
    groups: dict[tuple[Activity, str, str], list[int]] = {}
    for rank in ranks:
        where = scene.ranks[rank]
        groups.setdefault((where.activity, where.place, where.call), []).append(rank)
    return [tuple(group) for group in groups.values()]


def _weight(scene: _JobState, group: tuple[int, ...]) -> int:
    doing = scene.ranks[group[0]].activity
    return [*_CAUSES, *Activity].index(doing)


def _wait(scene: _JobState, waiting: tuple[int, ...], for_whom: Sequence[int]) -> str:
    """`ranks 0-2 wait for it in JAX (train.py:88 train_step)`."""
    groups = _alike(scene, waiting)
    where = scene.ranks[waiting[0]]
    it = "it" if len(for_whom) == 1 else "them"
    told = f"{format_ranks(waiting)} {_verb(waiting, 'waits', 'wait')} for {it}"
    if len(groups) > 1:
        return f"{told} at {_list(_unique(scene.ranks[rank].place for rank in waiting))}"
    if where.activity is Activity.BARRIER:
        return f"{told} in a barrier ({_called(where)})"
    return f"{told} in JAX ({_called(where)})" if where.is_certain else f"{told} at {where.place}"


def _in(where: RankState, many: bool = False) -> str:
    """`waits in a barrier (sync_global_devices at train.py:40 save)`."""
    wait = "wait" if many else "waits"
    if where.activity is Activity.BARRIER:
        return f"{wait} in a barrier ({_called(where)})"
    return f"{wait} in JAX ({_called(where)})" if where.is_certain else f"{wait} at {where.place}"


def _called(where: RankState) -> str:
    return f"{where.call} at {where.place}" if where.call else where.place


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _unique(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _list(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b, c and 2 more`."""
    shown = list(parts[:3]) + ([f"{len(parts) - 3} more"] if len(parts) > 3 else [])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else ""
