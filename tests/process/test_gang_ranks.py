"""A rank of a gang: an interrupt ends what its function does and loses nothing, and JAX's arrays arrive as numpy's."""

import os
import select
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gang_by_hand import serving_calls

from jaxrun.protocol.gang_messages import GangMessageKind, pack
from jaxrun_runtime.gang import calls

pytestmark = pytest.mark.jax_version

LARGE = 2**20  # bytes that do not fit into a socket


@pytest.fixture
def serve(monkeypatch):
    with serving_calls(monkeypatch) as run:
        yield run


def current():
    return calls.current_call()


@pytest.mark.filterwarnings("ignore:os.fork")  # where another test has started JAX's backend
def test_a_process_that_the_function_forks_is_interrupted_as_under_python(serve):
    def forking():
        pid = os.fork()
        if pid:
            return os.waitpid(pid, 0)[1]
        os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)

    def call(caller):
        caller.run(forking)
        return caller.receive()

    assert serve(call) == (GangMessageKind.RESULT, 0)


def test_while_nothing_runs_there_is_nothing_to_interrupt(serve):
    def call(caller):
        caller.run(int)
        caller.receive()
        caller.interrupt()
        caller.run(lambda: "next", number=2, interrupts=1)
        return caller.receive()

    assert serve(call) == (GangMessageKind.RESULT, "next")


def test_the_end_of_the_function_is_sent_before_its_result_is_packed(serve):
    """So the caller knows that a result is on its way, however long that takes."""

    def kinds(function):
        def call(caller):
            caller.run(function)
            return [caller.reader.receive().kind for _ in range(2)]

        return serve(call)

    assert kinds(int) == [GangMessageKind.ENDED, GangMessageKind.RESULT]
    assert kinds(lambda: 1 / 0) == [GangMessageKind.ENDED, GangMessageKind.EXCEPTION]


def sleeping():
    current().send("asleep")
    time.sleep(60)


INTERRUPTS = {
    "by the caller while it works": (lambda caller: (caller.run(sleeping), caller.receive(), caller.interrupt()), 1),
    "from elsewhere while it works": (lambda caller: caller.run(signal.raise_signal, signal.SIGINT), 0),
    "from elsewhere while it is idle": (lambda caller: (caller.interrupt(), caller.run(time.sleep, 60)), 0),
    "faster than the function it is meant for": (lambda caller: (caller.interrupt(), caller.run(time.sleep, 60)), 1),
}


@pytest.mark.parametrize(("interrupt", "sent"), INTERRUPTS.values(), ids=INTERRUPTS)
def test_an_interrupt_ends_one_function_at_most_and_not_the_rank(serve, interrupt, sent):
    def call(caller):
        interrupt(caller)
        received = [caller.receive()[1]["error"]]
        for number in (2, 3):
            caller.run(lambda: "undisturbed", number=number, interrupts=sent)
            received.append(caller.receive()[1])
        return received

    assert serve(call) == ["KeyboardInterrupt", "undisturbed", "undisturbed"]


def test_an_interrupt_that_was_meant_for_an_earlier_function_does_not_hit_the_next(serve, monkeypatch):
    """The interrupt passes through the launcher, and may arrive after the next task."""
    waited = threading.Event()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (waited.set(), sleep(seconds)))

    def call(caller):
        caller.run(lambda: "undisturbed", interrupts=1)
        assert waited.wait(60)
        caller.interrupt()
        return caller.receive()

    assert serve(call) == (GangMessageKind.RESULT, "undisturbed")


def test_the_wait_for_an_interrupt_that_does_not_come_ends(serve, monkeypatch):
    monkeypatch.setattr(calls, "INTERRUPT_TIMEOUT_S", 0.01)

    def call(caller):
        caller.run(lambda: "late", interrupts=5)
        first = caller.receive()
        caller.run(lambda: "at once", number=2, interrupts=5)
        return first, caller.receive()

    assert serve(call) == ((GangMessageKind.RESULT, "late"), (GangMessageKind.RESULT, "at once"))


def test_an_interrupt_while_a_value_is_sent_waits_until_it_was_sent(serve):
    def sending():
        try:
            current().send(bytes(LARGE))
        except KeyboardInterrupt:
            current().send("and then interrupted")

    def call(caller):
        caller.run(sending)
        select.select([caller.connection], [], [], 60)  # it has begun, and cannot end before we read
        caller.interrupt()
        return [caller.receive() for _ in range(3)]

    (_, value), second, last = serve(call)
    assert len(value) == LARGE
    assert (second, last) == ((GangMessageKind.VALUE, "and then interrupted"), (GangMessageKind.RESULT, None))


def test_an_interrupt_while_a_value_comes_loses_nothing(serve):
    def receiving():
        call = current()
        call.send("ready")
        try:
            call.receive()
        except KeyboardInterrupt:
            call.send("interrupted")
        return len(call.receive()), call.receive()

    def call(caller):
        caller.run(receiving)
        received = [caller.receive()]
        parts = pack(GangMessageKind.VALUE, 1, bytes(LARGE), share=False).to_parts()
        frame = b"".join(piece for part in parts for piece in part)
        caller.connection.sendall(frame[:-1])  # more than fits, so it has taken some of it
        caller.interrupt()
        caller.connection.sendall(frame[-1:])
        received.append(caller.receive())
        caller.send("next")
        return *received, caller.receive()

    assert serve(call) == (
        (GangMessageKind.VALUE, "ready"),
        (GangMessageKind.VALUE, "interrupted"),
        (GangMessageKind.RESULT, (LARGE, "next")),
    )


def test_an_interrupt_while_a_result_is_sent_is_not_a_failure(serve):
    """The function is over then."""

    def call(caller):
        caller.run(lambda: bytes(LARGE))
        select.select([caller.connection], [], [], 60)
        caller.interrupt()
        kind, value = caller.receive()
        caller.run(lambda: "next", number=2, interrupts=1)
        return kind, len(value), caller.receive()

    assert serve(call) == (GangMessageKind.RESULT, LARGE, (GangMessageKind.RESULT, "next"))


# ---- exceptions


def exits(*args):
    raise SystemExit(0)


HOSTILE = [
    "__str__",
    "__repr__",
    "__reduce__",
    "__notes__",
    "add_note",
    "__setattr__",
    "__getattribute__",
    "__module__",
]


@pytest.mark.parametrize("method", HOSTILE)
def test_a_rank_outlives_an_exception_whose_class_exits_or_raises(serve, method):
    own = {method: property(exits) if method in ("__notes__", "__module__") else exits}
    kind = type("Hostile", (Exception,), own)

    class Unpicklable:
        def __reduce__(self):
            raise kind("x")

    def fail():
        raise kind("x")

    def call(caller):
        received = []
        for number, function in enumerate((fail, Unpicklable, lambda: "next"), 1):
            caller.run(function, number=number)
            received.append(caller.receive())
        return received

    failed, unpicklable, after = serve(call)
    assert (failed[0], unpicklable[0]) == (GangMessageKind.EXCEPTION,) * 2
    assert after == (GangMessageKind.RESULT, "next")
    assert "Hostile" in str(failed[1]) and "Hostile" in str(unpicklable[1])


# ---- JAX's arrays


def sent(value):
    """What arrives."""
    return pack(GangMessageKind.RESULT, 1, value, share=False, reduce=calls.reduce_array).load()


ARRAYS = {
    "integers": jnp.arange(6).reshape(2, 3),
    "bfloat16": jnp.array([1.5, -2], jnp.bfloat16),
    "float8": jnp.array([0.5], jnp.float8_e4m3fn),
    "complex": jnp.array([1 + 2j]),
    "booleans": jnp.array([True, False]),
    "nothing": jnp.zeros((0, 3)),
    "a scalar": jnp.float32(3),
    "not contiguous": jnp.arange(6).reshape(2, 3).T,
}


@pytest.mark.parametrize("value", ARRAYS.values(), ids=ARRAYS)
def test_an_array_arrives_as_a_numpy_array(value):
    made = sent(value)
    assert type(made) is np.ndarray
    assert (made.dtype, made.shape) == (value.dtype, value.shape)
    assert np.array_equal(made, np.asarray(value))


def test_arrays_within_a_value_arrive_too_and_all_else_travels_as_it_is():
    made = sent({"params": [jnp.ones(2), (jnp.zeros(3), "text")], "key": 1})
    assert type(made["params"][0]) is np.ndarray and type(made["params"][1][0]) is np.ndarray
    assert made["params"][1][1] == "text" and made["key"] == 1
    assert [calls.reduce_array(value) for value in (np.ones(3), "x")] == [NotImplemented] * 2
    assert type(sent(np.float32(2))) is np.float32
    assert sent(jnp.dtype("bfloat16")) == jnp.bfloat16
    assert sent(jax.tree_util.Partial(np.add, 1))(2) == 3


def test_returning_a_random_key_says_what_to_return_instead_and_a_deleted_array_says_that_it_is_deleted():
    for key in (jax.random.key(0), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(ValueError, match=r"return jax.random.key_data\(key\)"):
            sent([key])
        assert np.array_equal(sent(jax.random.key_data(key)), jax.random.key_data(key))
    value = jnp.ones(2)
    value.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        sent(value)
