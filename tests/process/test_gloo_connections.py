"""Gloo's connections: open before a program needs them, whatever its groups are, and however late a rank comes."""

import pytest

pytestmark = pytest.mark.jax_version

_ONE_DEVICE = {"JAX_NUM_CPU_DEVICES": "1"}
_TABLE = """
import time, jax, numpy as np, jax.numpy as jnp
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
client = distributed.global_state.client
rank = jax.process_index()
everybody = ",".join(str(device.id) for device in jax.devices())

def groups(prefix):
    "The groups that the coordinator's table has keys of: of Gloo's connections, and of meetings."
    try:
        return {key.split(prefix)[1].split("/")[0] for key, _ in client.key_value_dir_get_bytes(prefix)}
    except Exception:  # there is none yet
        return set()
"""

# Collectives of each kind along each axis of several meshes, those that a compiler adds, and those of JAX's own tools.
_ALL_KINDS = """
devices = np.array(jax.devices())
for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3]):
    mesh = Mesh(devices[order].reshape(2, 2), ("a", "b"))
    place = NamedSharding(mesh, P("a", "b"))
    x = jax.make_array_from_callback((4, 4), place, lambda index: np.arange(16.0).reshape(4, 4)[index])

    def kinds(x):
        swapped = jax.lax.ppermute(x, "a", [(0, 1), (1, 0)])
        spread = jax.lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
        whole = jax.lax.all_gather(x, ("a", "b"), tiled=True)
        return jax.lax.psum(x.sum(), "a"), swapped, spread, whole, jax.lax.all_to_all(x, "b", 0, 1)

    results = P(), P("a", "b"), P("a", "b"), P(), P("a", "b")
    kinds = jax.shard_map(kinds, mesh=mesh, in_specs=P("a", "b"), out_specs=results, check_vma=False)
    jax.block_until_ready(jax.jit(kinds)(x))
    turned = NamedSharding(mesh, P("b", "a"))
    jax.block_until_ready(jax.jit(lambda x: jnp.roll(x, 1, axis=0) + (x @ x.T), out_shardings=turned)(x))
    jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c @ c / c.sum(), x))(x))
jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(np.ones(jax.local_device_count()))
multihost_utils.sync_global_devices("all have run")
owners = {str(device.id): device.process_index for device in jax.devices()}
used = {group for group in groups("cpu:gloo/") if len({owners[one] for one in group.split(",")}) > 1}
print(len(used), sorted(used - groups("jaxrun/gloo/")))
"""


@pytest.mark.extended
@pytest.mark.parametrize("lockstep", ["record", pytest.param("off", marks=pytest.mark.extended)])
def test_the_ranks_of_every_group_have_met_before_gloo_connects_them(start, script, lockstep):
    for worker in start([script(_TABLE + _ALL_KINDS)], 2, local={"lockstep": lockstep}).run():
        count, without_meeting = worker.out.split(" ", 1)
        assert int(count) >= 6
        assert without_meeting == "[]\n"


# Rank 1 sees rank 0 come, and that Gloo has not begun to count; then the connections are open while a program computes.
_LATE = """
if rank == 1:
    client.blocking_key_value_get(f"jaxrun/gloo/{everybody}/0", 60_000)
    print("before", groups("cpu:gloo/"))
mesh = Mesh(np.array(jax.devices()), "a")

def compute(x):
    return np.float32(everybody in groups("cpu:gloo/")) + x

def program(x):
    x = jax.pure_callback(compute, jax.ShapeDtypeStruct(x.shape, jnp.float32), x)
    return jax.lax.psum(x, "a")

x = jax.make_array_from_callback((2,), NamedSharding(mesh, P("a")), lambda index: np.zeros(1, "f"))
program = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("a"), out_specs=P()))
print("connected while it computes:", program(x).addressable_data(0))
"""


def test_gloo_does_not_count_while_a_rank_is_late_nor_while_a_program_computes(start, script):
    on_time, late = start([script(_TABLE + _LATE)], 2, env=_ONE_DEVICE).run()
    assert on_time.out == "connected while it computes: [2.]\n"
    assert late.out == f"before set()\n{on_time.out}"


# A handler's exception comes while rank 0 waits for rank 1, which will make the same calls.
_INTERRUPTED = """
import os, signal, threading

class Alarm(Exception):
    pass

def raise_alarm(*_):
    raise Alarm

def send():
    client.blocking_key_value_get(f"jaxrun/gloo/{everybody}/0", 60_000)
    os.kill(os.getpid(), signal.SIGALRM)
    client.key_value_set("sent", "")

if rank == 0:
    signal.signal(signal.SIGALRM, raise_alarm)
    threading.Thread(target=send).start()
else:
    client.blocking_key_value_get("sent", 60_000)
try:
    multihost_utils.sync_global_devices("first")
except Alarm:
    print("alarm")
multihost_utils.sync_global_devices("second")
print("met")
"""


@pytest.mark.extended
def test_an_exception_of_a_signals_handler_leaves_the_ranks_in_step(start, script):
    first, second = start([script(_TABLE + _INTERRUPTED)], 2, env=_ONE_DEVICE).run()
    assert (first.out, second.out) == ("alarm\nmet\n", "met\n")


@pytest.mark.extended
def test_a_rank_may_be_later_than_gloo_would_wait(start, script):
    late = "if rank == 1: time.sleep(33)\nmultihost_utils.sync_global_devices('late'); print('met')"
    assert [worker.out for worker in start([script(_TABLE + late)], 2, env=_ONE_DEVICE).run()] == ["met\n"] * 2
