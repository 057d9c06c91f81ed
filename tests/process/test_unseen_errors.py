"""Jobs whose error nobody sees: it is handled while its rank waits, orbax keeps it, or JAX quotes it."""

import signal

import pytest
from harness import extended, jaxrun, started

CLOSES = """
import sys, threading
import jax
from jax._src import distributed
from jax.experimental.multihost_utils import sync_global_devices
def close():
    distributed.global_state.client.wait_at_barrier("close", 600_000)
def load():
    try:
        raise ValueError("bad record in shard 1")
    finally:
        close()
if jax.process_index() == 1:
    if "thread" in sys.argv:
        threading.Thread(target=load, name="Loader", daemon=True).start()
        distributed.global_state.client.blocking_key_value_get("loaded", 600_000)
    load()
sync_global_devices("step")
"""
AS_RAISED = "ValueError: bad record in shard 1 (program0.py:10 load)"


@pytest.mark.jax_version
@pytest.mark.parametrize("thread", ["", pytest.param("thread", marks=pytest.mark.extended)])
def test_an_exception_that_is_handled_while_its_rank_hangs_is_the_cause(tmp_path, script, thread):
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "2", str(script(CLOSES)), *filter(None, [thread]))
    verdict, text = result.verdict(), " ".join(result.err.split())
    assert (result.code, verdict["culprits"]) == (124, [1])
    assert AS_RAISED in verdict["headline"]
    place = f"rank 1's thread Loader handles {AS_RAISED} and" if thread else f"rank 1 handles {AS_RAISED} and"
    assert f"{place} waits in JAX's barrier 'close'" in text
    assert "and rank 0 waits for it in a barrier (sync_global_devices at program0.py:" in text
    assert "line 10, in load\nValueError: bad record in shard 1" in verdict["traceback"]
    if thread:
        assert "in JAX: blocking_key_value_get 'loaded'" in text


@pytest.mark.parametrize("signum", [signal.SIGTERM, extended(signal.SIGINT)])
def test_a_signal_that_ends_such_a_hang_leaves_the_exception_in_the_verdict(tmp_path, script, signum):
    with started(tmp_path, "-n", "2", "--stall-notice", "1", "--grace", "1", str(script(CLOSES))) as job:
        job.wait_for_event("StallNotice")
        job.process.send_signal(signum)
        result = job.result()
    verdict = result.verdict()
    assert (result.code, verdict["outcome"], verdict["culprits"]) == (128 + signum, "interrupted", [1])
    assert "into the run, while rank 1 handled ValueError: bad record in shard 1; " in verdict["headline"]
    (cause,) = verdict["details"]
    assert f"rank 1 handles {AS_RAISED} and waits in JAX's barrier 'close'" in cause


FUTURES = """
import asyncio, queue, sys, threading
from concurrent.futures import ThreadPoolExecutor
import jax
from jax.experimental.multihost_utils import sync_global_devices
data = queue.Queue()
def load():
    raise ValueError("bad record in shard 1")
async def load_later():
    load()
async def main():
    task = asyncio.create_task(load_later())
    await asyncio.get_running_loop().run_in_executor(None, data.get)
if jax.process_index() == 1:
    if sys.argv[1] == "executor":
        task = ThreadPoolExecutor(1).submit(load)
        data.get()
    elif sys.argv[1] == "thread":
        threading.Thread(target=load, name="Loader").start()
        data.get()
    else:
        asyncio.run(main())
sync_global_devices("step")
"""
HOLDS = "its future holds ValueError: bad record in shard 1 (program0.py:8 load), for which nobody has asked"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("executor", HOLDS),
        extended("task", HOLDS),
        extended("thread", "its thread Loader ended with ValueError: bad record in shard 1 (program0.py:8 load)"),
    ],
)
def test_an_exception_that_only_a_future_holds_or_that_ended_a_thread_is_told_once_in_full(
    tmp_path, script, kind, said
):
    result = jaxrun(tmp_path, "-n", "2", "--stall-notice", "1", "--stall-timeout", "6", str(script(FUTURES)), kind)
    assert result.code == 124 and f", but {said}, and rank 0 waits for it" in str(result.verdict()["headline"]), result
    notices, _, shown = result.err.rpartition("jaxrun: no progress")
    assert f", but {said}, and rank 0 waits for it" in notices
    assert "waits for it" not in shown and f", but {said}; more above\n" in shown, result
    assert "had lost a thread" not in shown


CALLBACKS = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import io_callback
from jax.experimental.multihost_utils import sync_global_devices
def load(x):
    raise ValueError("bad record in shard 1")
def host(x):
    if jax.process_index() == 1:
        load(x)
    return x
@jax.jit
def step(x):
    if sys.argv[1] == "debug":
        jax.debug.callback(host, x)
        return x
    return (jax.pure_callback if sys.argv[1] == "pure" else io_callback)(host, jax.ShapeDtypeStruct((), jnp.float32), x)
jax.block_until_ready(step(jnp.float32(1)))
jax.effects_barrier()
sync_global_devices("end")
"""


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize("kind", ["debug", "pure", "io"])
def test_the_exception_of_a_callback_is_shown_once_and_without_jaxruns_frames(tmp_path, script, kind):
    result = jaxrun(tmp_path, "-n", "2", str(script(CALLBACKS)), kind)
    assert result.code == 1 and result.verdict()["culprits"] == [1]
    assert "rank 1 of 2 raised ValueError: bad record in shard 1 in a callback of JAX" in result.err
    assert result.err.count('line 7, in load\n    raise ValueError("bad record in shard 1")\n') == 1
    assert "callback failed: ValueError: bad record in shard 1 (program0.py:7 load)" in result.out + result.err
    assert "jaxrun_runtime" not in result.err and "runpy" not in result.err
    (failed,) = result.events("Failed")
    assert [error["error"] for error in failed["chain"]] == ["ValueError", "JaxRuntimeError"]


ORBAX = """
import sys
from pathlib import Path
import jax, numpy as np
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
x = jax.make_array_from_callback((8,), sharding, lambda index: np.zeros(8, np.float32)[index])
if jax.process_index() == 1:
    from orbax.checkpoint import PyTreeCheckpointHandler
    class Full:
        def result(self, timeout=None):
            raise OSError(28, "No space left on device")
    original = PyTreeCheckpointHandler.async_save
    async def async_save(self, *args, **more):
        return [*(await original(self, *args, **more) or []), Full()]
    PyTreeCheckpointHandler.async_save = async_save
where, state = Path("checkpoints").absolute(), ocp.args.StandardSave({"x": x})
if sys.argv[1] == "manager":
    manager = ocp.CheckpointManager(where, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=True))
    manager.save(1, args=state)
    manager.save(2, args=state)
else:
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    checkpointer.save(where / "1", args=state)
    if jax.process_index() == 0:
        checkpointer.wait_until_finished()
    sync_global_devices("saved")
"""


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["manager", "checkpointer"])
def test_a_background_save_that_fails_on_one_rank_is_named_while_another_waits_for_it(tmp_path, script, kind):
    result = jaxrun(tmp_path, "-n", "2", "--stall-timeout", "3", str(script(ORBAX)), kind)
    text = " ".join(result.err.split())
    assert (result.code, result.verdict()["culprits"]) == (124, [1])
    step = " of step 1" if kind == "manager" else ""
    assert f"rank 1's background save{step} failed with OSError: [Errno 28] No space left on device" in text
    assert "and rank 0 waits for it in JAX's barrier" in text and "in its thread async_save)" in text
