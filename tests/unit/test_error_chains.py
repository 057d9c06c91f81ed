"""Chains of exceptions: what a rank tells of them, which one is the headline, and what callbacks add."""

import contextlib
import traceback

import pytest
from outcomes import end, weigh

from jaxrun.analysis.diagnosis.error_choice import choose_error
from jaxrun.analysis.verdict import phrasing
from jaxrun.protocol.codec import encode
from jaxrun.protocol.error_chain import ThreadNotes, format_notes, parse_notes
from jaxrun.protocol.worker_messages import WorkerMessageDecoder
from jaxrun_runtime import callback_errors, error_chains, failure_report

pytestmark = pytest.mark.jax_version

BROKEN = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:24984"


def load():
    raise ValueError("bad record in shard 1")


def close():
    raise OSError(28, "No space left on device", "/scratch")


def fails_in_finally():
    try:
        load()
    finally:
        close()


def fails_in_c_in_finally():
    try:
        load()
    finally:
        int("x")


def fails_in_exit():
    class Trainer:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            raise OSError(5, "Input/output error")

    with Trainer():
        load()


def fails_in_a_generator():
    @contextlib.contextmanager
    def trainer():
        try:
            yield
        finally:
            close()

    with trainer():
        load()


def translates():
    try:
        {}["shard"]
    except KeyError:
        raise ValueError("no such shard")  # noqa: B904


def translates_by_from():
    try:
        close()
    except OSError as error:
        raise RuntimeError("cannot write") from error


def translates_and_fails_then():
    try:
        translates_by_from()
    finally:
        close()


def hides():
    try:
        close()
    except OSError:
        raise RuntimeError("cannot write") from None


def breaks_then_fails():
    try:
        raise RuntimeError(BROKEN)
    except RuntimeError:
        load()


def is_interrupted_and_fails_then():
    try:
        raise KeyboardInterrupt
    finally:
        close()


def leaves():
    try:
        load()
    except ValueError:
        raise SystemExit(3) from None


def exits():
    try:
        load()
    except ValueError:
        contextlib.suppress(KeyError).__exit__(None, None, None)
        exit_with(3)


def exit_with(status):
    raise SystemExit(status)


def caught(function):
    try:
        function()
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # this function's own frame
        return error
    raise AssertionError(function)


def chain_of(function):
    return error_chains.describe_chain(caught(function), error_chains.plain_text)


FULL = "OSError: [Errno 28] No space left on device: '/scratch'"
CHOICES = [
    (load, "ValueError", None, None),
    (fails_in_finally, "ValueError", None, "OSError"),
    (fails_in_c_in_finally, "ValueError", None, "ValueError"),
    (fails_in_exit, "ValueError", None, "OSError"),
    (fails_in_a_generator, "ValueError", None, "OSError"),
    (translates, "ValueError", "KeyError", None),
    (translates_by_from, "RuntimeError", "OSError", None),
    (translates_and_fails_then, "RuntimeError", "OSError", "OSError"),
    (hides, "RuntimeError", None, None),
    (breaks_then_fails, "ValueError", None, None),
    (is_interrupted_and_fails_then, "OSError", None, None),
]


@pytest.mark.parametrize(("function", "chosen", "cause", "followed"), CHOICES, ids=[one[0].__name__ for one in CHOICES])
def test_the_first_exception_that_is_no_consequence_is_chosen_or_what_the_program_raised_in_its_place(
    function, chosen, cause, followed
):
    choice = choose_error(chain_of(function))
    names = [error and error.error for error in (choice.chosen, choice.cause, choice.followed)]
    assert names == [chosen, cause, followed]


def failure_of(function):
    return failure_report.describe_failure(caught(function), 1)


HEADLINES = [
    (load, "raised ValueError 3"),
    (fails_in_finally, "raised ValueError: bad record in shard 1, and OSError while it handled that, 3"),
    (translates_by_from, f"raised RuntimeError, caused by {FULL}, 3"),
    (
        exits,
        "ended with status 3 (sys.exit), while it handled ValueError: bad record in shard 1 (test_error_chains.py:",
    ),
    (leaves, "ended with status 3 (sys.exit) 3"),
]


@pytest.mark.parametrize(("function", "words"), HEADLINES, ids=[one[0].__name__ for one in HEADLINES])
def test_the_headline_names_the_cause(function, words):
    failure = failure_of(function)
    (received,) = WorkerMessageDecoder().feed(encode(failure))
    assert received == failure
    verdict = weigh(*(end(rank, 3.0, 1, failure=received) for rank in (1,)), hosts={0: "h", 1: "h"})
    assert verdict.headline.startswith(f"rank 1 of 2 {words}")


def test_a_victim_is_described_by_the_cause_and_its_line():
    worker = end(1, 3.0, 1, failure=failure_of(fails_in_finally))
    line = load.__code__.co_firstlineno + 1
    assert phrasing.describe_victim(worker) == f"raised ValueError at test_error_chains.py:{line}"


def test_only_what_led_to_the_cause_is_explained():
    def mismatch_while_closing():
        try:
            load()
        finally:
            check_names()

    def check_names():
        raise AssertionError("sync_global_devices name mismatch ('close'). Expected: [1 2]; got: 2.")

    verdict = weigh(end(1, 3.0, 1, failure=failure_of(mismatch_while_closing)), hosts={0: "h", 1: "h"})
    assert "ValueError" in verdict.headline and not verdict.means
    # The others have seen the other name, a moment earlier: it follows from the error of rank 1.
    others = [end(rank, 2.9, 1, failure=failure_of(check_names)) for rank in (0, 2)]
    ends = [others[0], end(1, 3.0, 1, failure=failure_of(mismatch_while_closing)), others[1]]
    assert weigh(*ends, hosts=dict.fromkeys(range(3), "h")).culprits == (1,)
    alone = weigh(*others, hosts=dict.fromkeys(range(3), "h"))
    assert alone.culprits == (0, 2) and "different points" in alone.means


def test_a_rank_that_leaves_by_sys_exit_because_a_connection_broke_is_a_victim():
    def gives_up():
        try:
            raise RuntimeError(BROKEN)
        except RuntimeError:
            exit_with(1)

    ends = [end(0, 2.9, 1, failure=failure_of(gives_up)), end(1, 3.0, 1, failure=failure_of(load))]
    assert weigh(*ends, hosts={0: "h", 1: "h"}).culprits == (1,)


def test_a_message_is_made_without_the_programs_code():
    class OwnError(ValueError):
        def __str__(self):
            raise AssertionError("its code runs")

    class Array:
        __repr__ = __str__ = OwnError.__str__

    def raise_(error):
        raise error

    for error, text in [
        (OwnError("bad record", 3), "bad record"),
        (ValueError("bad record", Array()), "bad record"),
        (ValueError("bad record", 3), "('bad record', 3)"),
        (KeyError(Array()), ""),
        (OSError(2, "No such file", Array()), "No such file"),
        (FileNotFoundError(2, "No such file", "a"), "[Errno 2] No such file: 'a'"),
        (ExceptionGroup("two", [OwnError()]), "two"),
        (SystemExit(3), "3"),
    ]:
        (described,) = error_chains.describe_chain(caught(lambda error=error: raise_(error)), error_chains.plain_text)
        assert (described.error, described.message) == (type(error).__name__, text)


def test_a_chain_may_be_a_ring_and_endless():
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert [one.message for one in error_chains.describe_chain(first, str)] == ["2", "1"]
    error = None
    for number in range(1000):
        error, error.__context__ = ValueError(str(number)), error  # type: ignore[union-attr]
    assert len(error_chains.describe_chain(error, str)) == 20


def test_what_a_thread_handles_is_read_from_its_stack_and_nothing_else_is():
    notes = ThreadNotes(chain_of(fails_in_finally))
    lines = ["  Handles [", '  Waits {"function": 1}', *format_notes(notes), "  Saves null"]
    assert parse_notes(lines) == notes
    assert not parse_notes(["  Handles 1", "  Handles [1]", "  Saves {", "  Waits []"]).handled


def test_while_a_generator_or_an_exit_runs_the_exception_is_being_handled():
    seen = []

    def look():
        seen.append([chain[-1].error for chain in error_chains.handled_errors().values()])

    def generate():
        try:
            yield
        finally:
            look()

    class Trainer:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            look()

    def run(manager):
        with manager:
            load()

    look()
    caught(lambda: run(contextlib.contextmanager(generate)()))
    caught(lambda: run(Trainer()))
    look()
    assert seen == [[], ["ValueError"], ["ValueError"], []]


QUOTED = """INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/v/lib/python3.13/site-packages/jaxrun_runtime/worker.py", line 66, in run_worker
  File "/job/train.py", line 16, in main
  File "/v/lib/python3.13/site-packages/jax/_src/interpreters/pxla.py", line 413, in __call__
  File "/v/lib/python3.13/site-packages/jax/_src/callback.py", line 829, in _wrapped_callback
  File "/v/lib/python3.13/site-packages/jax/_src/debugging.py", line 507, in _flat_callback
  File "/job/train.py", line 8, in host
  File "/v/lib/python3.13/site-packages/jax/_src/numpy/reductions.py", line 6, in sum
ValueError: bad record 1
and more of it"""


class JaxRuntimeError(RuntimeError):
    """As JAX's."""


def fails_in_a_callback():
    raise JaxRuntimeError(QUOTED)


def test_the_exception_of_a_callback_is_the_cause_and_has_a_traceback_of_its_own():
    quoted, error = chain_of(fails_in_a_callback)
    assert (quoted.error, quoted.message) == ("ValueError", "bad record 1\nand more of it")
    assert [place[1:] for place in quoted.places] == [(8, "host"), (6, "sum")]
    assert error.message.startswith("INTERNAL: CpuCallback error calling callback: ValueError: bad record 1")
    failure = failure_of(fails_in_a_callback)
    own, ours = failure.traceback.split("The above exception was the direct cause of the following exception:")
    assert own.startswith('Traceback (most recent call last):\n  File "/job/train.py", line 8, in host\n')
    assert own.rstrip().endswith("ValueError: bad record 1\nand more of it")
    assert "jaxrun_runtime/worker.py" not in failure.traceback and "pxla" not in ours
    verdict = weigh(end(1, 3.0, 1, failure=failure), hosts={0: "h", 1: "h"})
    assert verdict.headline.startswith("rank 1 of 2 raised ValueError: bad record 1 in a callback of JAX, 3")


@pytest.mark.parametrize(
    "text", ["", QUOTED.replace("callback", "function").replace("Callback", ""), QUOTED[:90], "a\nTraceback"]
)
def test_a_text_that_quotes_no_callback_is_left_alone(text):
    assert callback_errors.find_quoted(text) is None
    formatted = "".join(traceback.format_exception(ValueError(text)))
    assert callback_errors.separate(formatted, text) == formatted
