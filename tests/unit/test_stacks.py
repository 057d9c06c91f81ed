"""Dumps of Python's fault handler are read back, and shown with how far ranks have come; the samples are real ones."""

import pytest
from calls_by_hand import flight_after
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.analysis.diagnosis import stacks
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict import stack_text
from jaxrun.analysis.verdict.stack_text import describe_stacks
from jaxrun.controller.head.head_state import HeadState, TimeLimits
from jaxrun.controller.head.queries import RankQueries, flights_of
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.job_events.actions import PrintLine, Send
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.query_messages import ProcessState, RankDetail, RankQuery, RankReply

LIB = "/usr/lib/python3.11"
SITE = "/venv/lib/python3.11/site-packages"
LOADER = f"""Thread 0x00007f3f060fc6c0 (most recent call first):
  File "{LIB}/threading.py", line 327 in wait
  File "{LIB}/queue.py", line 171 in get
  File "/job/data.py", line 3 in worker
  File "{LIB}/threading.py", line 982 in run
  File "{LIB}/threading.py", line 1045 in _bootstrap_inner
  File "{LIB}/threading.py", line 1002 in _bootstrap
"""
SCAFFOLD = f"""  File "{SITE}/jaxrun_runtime/run_program.py", line 44 in run
  File "<frozen runpy>", line 88 in _run_code
"""
IN_JAX = f"""Current thread 0x00007f3f06c46b80 (most recent call first):
  File "{SITE}/jax/experimental/multihost_utils.py", line 134 in _handle
  File "{SITE}/jax/_src/tree_util.py", line 399 in tree_map
  File "{SITE}/jax/experimental/multihost_utils.py", line 159 in process_allgather
  File "/job/train.py", line 88 in train_step
  File "/job/train.py", line 99 in <module>
{SCAFFOLD}"""
IN_QUEUE = f"""Current thread 0x00007f3f06c46b80 (most recent call first):
  File "{LIB}/threading.py", line 327 in wait
  File "{LIB}/queue.py", line 171 in get
  File "/job/data.py", line 31 in __next__
  File "/job/train.py", line 84 in main
{SCAFFOLD}"""
IN_LINE = """Current thread 0x00007f3f06c46b80 (most recent call first):
  File "/job/train.py", line 90 in train_step
"""
CRASHED_THREAD = f"""Fatal Python error: Segmentation fault

Current thread 0x00007efec3fff6c0 [Crasher] (most recent call first):
  File "{LIB}/ctypes/__init__.py", line 538 in string_at
  File "/job/train.py", line 15 in crash
  File "{LIB}/threading.py", line 992 in run
  File "{LIB}/threading.py", line 1041 in _bootstrap_inner
  File "{LIB}/threading.py", line 1012 in _bootstrap

Thread 0x00007efeca2bab80 [MainThread] (most recent call first):
  File "{LIB}/threading.py", line 979 in start
  File "/job/train.py", line 20 in <module>

Extension modules: numpy._core._multiarray_umath, jaxlib.cpu_feature_guard (total: 2)
"""
IN_WRAPPER = f"""Current thread 0x00007f3f06c46b80 (most recent call first):
  File "{SITE}/flax/nnx/transforms/compilation.py", line 1023 in __call__
  File "/job/train.py", line 90 in train_step
  File "/job/train.py", line 99 in <module>
{SCAFFOLD}"""
INSTALLED = IN_WRAPPER.replace("/job/", f"{SITE}/trainer/")  # a program that `python -m trainer` runs
ONE_HOST = dict.fromkeys(range(8), "here")


@pytest.mark.parametrize(
    ("dump", "threads", "functions"),
    [
        (f"{LOADER}\n{IN_JAX}", 2, ["train_step", "<module>"]),
        (f"{LOADER}\n{IN_JAX}{LOADER}\n{IN_QUEUE}", 2, ["__next__", "main"]),
        (LOADER, 1, ["worker"]),
        ("", 0, []),
        ("Traceback (most recent call last):\n  File x\n", 0, []),
    ],
    ids=["the last block", "of the last dump", "without a main thread", "nothing", "no dump"],
)
def test_the_main_thread_is(dump, threads, functions):
    stack = stacks.main_stack(dump)
    assert ([frame.function for frame in stack.users], stack.current) == (functions, "Current" in dump)
    assert len(stacks.parse_dump(dump)) == threads


@pytest.mark.parametrize(
    ("dump", "kernel_wait", "waits"),
    [
        (IN_JAX, "futex_do_wait", True),
        (IN_JAX, "0", False),
        (IN_QUEUE, "futex_do_wait", False),
        (IN_LINE, "futex_do_wait", True),
        (IN_LINE, "hrtimer_nanosleep", False),
        ("", "futex_do_wait", False),
    ],
)
def test_who_waits_in_jax(dump, kernel_wait, waits):
    assert stacks.is_waiting_in_jax(dump, kernel_wait) is waits


@pytest.mark.parametrize("dump", [IN_WRAPPER, INSTALLED])
@pytest.mark.parametrize(
    ("places", "kernel_wait", "waits"),
    [
        (["train.py:90 train_step"], "futex_do_wait", True),
        (["train.py:90 train_step"], "0", False),
        (["train.py:88 train_step"], "futex_do_wait", False),
        ((), "futex_do_wait", False),
    ],
)
def test_a_librarys_wrapper_waits_in_jax_where_its_caller_has_made_such_calls(dump, places, kernel_wait, waits):
    assert stacks.is_waiting_in_jax(dump, kernel_wait, places) is waits
    state = find_rank_state(0, dump, kernel_wait, places)
    assert state.activity is (Activity.CALL if waits else Activity.ELSEWHERE)
    assert state.place == "train.py:90 train_step"
    loader = dump.replace("/flax/nnx/transforms", "/grain")
    assert find_rank_state(0, loader, kernel_wait, places).activity is Activity.DATA


@pytest.mark.parametrize(
    ("dump", "place"),
    [
        (IN_JAX, "train.py:88 train_step   in JAX: process_allgather"),
        (IN_QUEUE, "data.py:31 __next__ <- train.py:84 main   in queue: get"),
        (IN_LINE, "train.py:90 train_step"),
        (IN_LINE.replace("/job/", f"{SITE}/jaxrun_runtime/programs/") + SCAFFOLD, "train.py:90 train_step"),
        (IN_LINE.replace("/job/", f"{SITE}/maxtext/") + SCAFFOLD, "train.py:90 train_step"),
        (INSTALLED, "train.py:90 train_step   in flax: __call__"),
    ],
    ids=["in JAX", "in Python's own", "in the program", "in one that jaxrun ships", "in one of a library", "in flax"],
)
def test_a_place_names_the_users_line_its_caller_and_what_it_called(dump, place):
    assert stack_text.find_place(stacks.main_stack(dump)).format() == place


def test_ranks_at_one_place_are_one_group_and_the_odd_one_is_named():
    dumps = {rank: IN_JAX for rank in range(8)} | {3: IN_QUEUE}
    assert stack_text.format_groups(dumps, ONE_HOST, {}).splitlines() == [
        "8 ranks, 2 groups",
        "  7 ranks  0-2, 4-7  train.py:88 train_step   in JAX: process_allgather",
        "  1 rank   3         data.py:31 __next__ <- train.py:84 main   in queue: get",
        "rank 3 is the one that differs.",
    ]


def test_hosts_are_named_if_there_are_several():
    hosts = ONE_HOST | {3: "h2"}
    lines = stack_text.format_groups({0: IN_JAX, 1: IN_JAX, 3: ""}, hosts, {}).splitlines()
    assert lines[1] == "  2 ranks  0-1 (here)  train.py:88 train_step   in JAX: process_allgather"
    assert lines[2] == "  1 rank   3 (h2)      no answer: it blocks signals, or is about to end"


def test_groups_of_equal_size_accuse_nobody():
    assert "differ" not in stack_text.format_groups({0: IN_JAX, 1: IN_QUEUE}, ONE_HOST, {})
    assert stack_text.format_groups({0: IN_JAX}, ONE_HOST, {}).startswith("1 rank, 1 group\n")
    assert stack_text.format_groups({}, ONE_HOST, {}) == ""


def test_a_crash_is_written_like_a_traceback_of_the_thread_that_crashed():
    assert stack_text.format_crash(CRASHED_THREAD).splitlines() == [
        "Stack (most recent call last):",
        '  File "/job/train.py", line 15, in crash',
        f'  File "{LIB}/ctypes/__init__.py", line 538, in string_at',
    ]
    no_frames = "Fatal Python error: Aborted\n\nCurrent thread 0x1f (most recent call first):\n"
    assert stack_text.format_crash(no_frames) == ""


@given(st.text() | st.lists(st.sampled_from([*f"{LOADER}\n{CRASHED_THREAD}".splitlines(), ""])).map("\n".join))
def test_no_text_breaks_the_parser(text):
    stack_text.format_groups({0: text}, {0: "here"}, {})
    stack_text.format_crash(text)
    stacks.is_waiting_in_jax(text, "futex")


def test_a_rank_that_does_not_answer_is_described_by_its_kernel_state():
    waits = {0: "futex_wait_queue", 1: ProcessState.STOPPED}
    lines = stack_text.format_groups({0: IN_JAX, 1: ""}, ONE_HOST, waits).splitlines()
    assert any("no answer: stopped by a signal" in line and "  1 " in line for line in lines)
    assert not any("futex" in line for line in lines)


def test_all_frames_are_shown_once_for_each_group_without_ours():
    text = stack_text.format_all_frames({0: IN_JAX, 1: IN_QUEUE, 2: IN_JAX, 3: ""}, {})
    assert text.startswith("ranks 0, 2:\n  File ") and "\n\nrank 1:\n" in text and text.endswith("rank 3:\n  no frames")
    assert "jaxrun_runtime/worker.py" not in text


# ---- the stacks of all ranks, with how far they have come

HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}


def look(dumps, flights, **more):
    waits = dict.fromkeys(dumps, "futex_wait_queue")
    return JobStacks(160.0, HOSTS, dumps, waits, flights, **more)


def test_each_group_says_how_far_its_ranks_have_come():
    flights = dict.fromkeys(range(3), flight_after(1204, entered_at=99.0)) | {3: flight_after(1204, time=97.0)}
    text = describe_stacks(look({0: IN_JAX, 1: IN_JAX, 2: IN_JAX, 3: IN_QUEUE}, flights))
    rows = text.splitlines()
    place = "train.py:88 train_step   in JAX: process_allgather"
    assert rows[0].startswith("rank 3 (h2) waits for data (queue.get) at data.py:31 __next__"), (
        "what it means comes first"
    )
    assert rows[-2].endswith(f"{place}       in call #1205 jit(step), 61.0 s")
    assert rows[-1].endswith(
        "data.py:31 __next__ <- train.py:84 main   in queue: get  after call #1204 jit(step), 63.0 s ago"
    )


def test_ranks_in_one_place_may_have_come_differently_far():
    flights = {0: flight_after(4), 1: flight_after(5), 2: flight_after(5, name="jit(mean)", group="0-1")}
    rows = describe_stacks(look({0: IN_JAX, 1: IN_JAX, 2: IN_JAX}, flights)).splitlines()
    assert "after calls #4-5 jit(step), 60.0 s ago or after call #5 jit(mean) of ranks 0-1" in rows[1]


def test_a_compilation_is_reported():
    text = describe_stacks(look({0: IN_JAX}, {0: flight_after(4, compiling=("jit(init)", 130.0))}))
    assert "compiling jit(init), 30.0 s" in text


def test_finished_ranks_are_reported_too():
    text = describe_stacks(look({0: IN_JAX, 1: IN_JAX}, {rank: flight_after(4) for rank in range(3)}, finished=(2, 3)))
    assert "ranks 2-3 (h2) have finished, after call #4 jit(step), 60.0 s ago." in text


def test_without_recorders_there_are_only_stacks():
    rows = describe_stacks(look({0: IN_JAX, 1: IN_QUEUE}, {})).splitlines()
    assert rows[-2].endswith("in JAX: process_allgather") and describe_stacks(look({}, {})) == ""


# ---- the replies of agents

STACKS, CALLS, NATIVE = RankDetail.STACKS, RankDetail.CALLS, RankDetail.NATIVE_STACKS


@pytest.fixture
def state():
    return HeadState(WorkerTable({}), TimeLimits(60.0, None, 5.0, 30.0))


@pytest.fixture
def queries(state):
    return RankQueries(state, lambda rank: rank != 1)


def ask(queries, ranks, detail, now=100.0):
    """Ask, and return the list to which the replies come."""
    came = []

    def then(replies, now):
        came.append(replies)
        return [PrintLine("done")]

    assert queries.ask(ranks, detail, then, now) == [Send(ranks, RankQuery(1, detail))]
    return came


def test_a_query_is_complete_when_all_have_replied(queries, state):
    came = ask(queries, (0, 3), STACKS)
    assert 100.5 < state.timers.next_at() < 105.0
    assert queries.handle(RankReply(0, 9), 100.1) == []  # of a query that nobody knows
    for reply in (RankReply(3, 1, stacks="stack"), RankReply(3, 1, stacks="again"), RankReply(2, 1)):
        assert queries.handle(reply, 100.1) == []
    assert queries.handle(RankReply(0, 1), 100.1) == [PrintLine("done")]
    assert came == [{0: RankReply(0, 1), 3: RankReply(3, 1, stacks="stack")}]
    assert state.timers.next_at() is None and queries.handle(RankReply(0, 1), 100.1) == []


def test_a_rank_that_does_not_reply_in_time_has_an_empty_reply_and_no_calls(queries, state):
    came = ask(queries, (0, 3), CALLS)
    queries.handle(RankReply(3, 1), 100.1)
    assert state.timers.fire(101.0) == [] and state.timers.fire(state.timers.next_at()) == [PrintLine("done")]
    assert came == [{0: RankReply(0), 3: RankReply(3, 1)}] and flights_of(came[0]) == {3: Flight()}
    assert queries.handle(RankReply(0, 1), 102.0) == []


def test_c_frames_take_longer(queries, state):
    ask(queries, (3,), NATIVE)
    assert state.timers.next_at() > 100.0 + NATIVE_STACKS_TIMEOUT_S


def test_where_no_rank_can_reply_nothing_is_waited_for(queries, state):
    assert queries.ask((1,), STACKS, lambda replies, now: [PrintLine(f"{replies} {now}")], 7.0) == [PrintLine("{} 7.0")]
    assert state.timers.next_at() is None
    assert queries.ask((1,), CALLS, lambda replies, now: [], 7.0) == [Send((1,), RankQuery(1, CALLS))]
