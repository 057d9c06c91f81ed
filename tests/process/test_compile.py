"""--compile auto: one rank of each host compiles for all. --compile-cache: later jobs load what one has compiled."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from harness import Job, Result, jaxrun, started, wait_until

# The first rank of each host compiles before the others, so that these find all, however loaded the machine is.
# XLA splits the loops into parts, at most one a core. At the end of a part, other instructions round otherwise.
_PROGRAM = """
import hashlib, os, sys, time
import jax
import jax.numpy as jnp
import jaxrun_runtime as jr
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

folder = sys.argv[1]
loaded = []
def count(event, **_):
    if event == "/jaxrun/compile_once/loaded":
        loaded.append(event)
jax.monitoring.register_event_listener(count)

rank = jax.process_index()
devices = np.array(jax.devices())
mesh = Mesh(devices, ("x",))
values = np.linspace(0, 1, devices.size * 4, dtype=np.float32)
x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda index: values[index])
own = jax.device_put(values, jax.local_devices()[-1])
square = jax.device_put(np.outer(values, values), jax.local_devices()[-1])
table = np.random.default_rng(0).random(100_000, dtype=np.float32)

def split_loop(size):
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    return jax.jit(lambda x: jnp.exp(x) * jnp.log1p(jnp.abs(x)) / jnp.sqrt(1 + x * x)), x

programs = {
    "over all ranks": (jax.jit(lambda x: jnp.sin(x).sum()), x),
    "sharded": (jax.jit(lambda x: jnp.cos(x)[::-1], out_shardings=NamedSharding(mesh, P("x"))), x),
    "last device": (jax.jit(lambda x: jnp.tanh(jnp.outer(x, x))), own),
    "LAPACK": (jax.jit(jnp.linalg.svd), square),
    "twice": (jax.jit(lambda x: x * 2), np.float32(1)),  # two that differ in what they compute alone
    "thrice": (jax.jit(lambda x: x * 3), np.float32(1)),
    "loop 1": split_loop(1_000_003),
    "loop 2": split_loop(1_000_005),
    "large": (jax.jit(lambda x: x + table), np.float32(1)),  # of more than a quarter of a MiB
}

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)

def compile_all(phase, programs):
    mark = os.path.join(folder, f"{phase}-{os.environ['JAXRUN_HOST']}")
    if jr.local_rank:
        wait_for(mark)
    loaded.clear()
    compiled, found = {}, []
    for name, (function, argument) in programs.items():
        before = len(loaded)
        compiled[name] = function.lower(argument).compile()
        found += [name] * (len(loaded) > before)
    open(mark, "w").close()
    print(f"{phase} loads:", ", ".join(found))
    return compiled

def digest(results):
    found = [leaf.addressable_data(0) for leaf in jax.tree.leaves(results)]
    return hashlib.sha256(b"".join(np.asarray(data).tobytes() for data in found)).hexdigest()

compiled = compile_all("free", programs)
results = {name: compiled[name](argument) for name, (_, argument) in programs.items()}
print("bits of rank", digest(results["sharded"]))
print("bits of all", digest([result for name, result in results.items() if name != "sharded"]))
called = jax.jit(lambda x: jax.pure_callback(lambda y: y + rank, jax.ShapeDtypeStruct((), "f"), x))(np.float32(1))
assert called == 1 + rank
ahead = compiled["last device"]
again = serialize_executable.deserialize_and_load(
    *serialize_executable.serialize(ahead), **({"execution_devices": jax.local_devices()[-1:]} if "execution_devices"
    in serialize_executable.deserialize_and_load.__code__.co_varnames else {}))
assert (np.asarray(again(own)) == np.asarray(ahead(own))).all()
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
if len(os.sched_getaffinity(0)) > 1:  # there are more cores than ranks
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.clear_caches()
    loops = {name: programs[name] for name in ("loop 1", "loop 2")}
    bound = compile_all("bound", loops)
    print("bits bound", digest([bound[name](argument) for name, (_, argument) in loops.items()]))
"""
_ALL = "over all ranks, sharded, last device, LAPACK, twice, thrice, loop 1, loop 2"


def _shared(job: Job | Result) -> list[str]:
    job_id = json.loads((job.run_dir / "job.json").read_text())["job_id"]
    # The directory goes with the last job that uses it.
    return [path.name for path in Path("/dev/shm").glob(f"jaxrun-{os.geteuid()}/*") if job_id in path.name]


def _bits_and_loads(folder: Path, *words: str) -> tuple[list[list[str]], list[list[str]]]:
    """What each rank prints of its results and of what it has loaded."""
    folder.mkdir()
    result = jaxrun(folder, *words[:-1], "-v", words[-1], str(folder))
    assert result.code == 0 and not _shared(result) and "could not load" not in result.err, result
    ranks = [path.read_text() for path in sorted(result.run_dir.glob("rank-*.out"))]
    return [re.findall(r"bits .*", text) for text in ranks], [re.findall(r"\w+ loads: .*", text) for text in ranks]


@pytest.mark.extended
@pytest.mark.jax_version
def test_results_are_those_of_each_and_all_but_one_rank_of_a_host_load(tmp_path: Path, script) -> None:
    words = ("-n", "4", "--simulate-hosts", "2", str(script(_PROGRAM)))
    bits, loads = _bits_and_loads(tmp_path / "each", "--compile", "each", *words)
    assert len({lines[1] for lines in bits}) == 1 and not any("loop" in line for lines in loads for line in lines)
    again, loads = _bits_and_loads(tmp_path / "once", "--compile", "auto", *words)
    assert again == bits
    assert [lines[0] for lines in loads] == ["free loads: ", f"free loads: {_ALL}, large"] * 2


@pytest.mark.extended
@pytest.mark.jax_version
def test_ranks_with_more_cores_do_not_share(tmp_path: Path, script) -> None:
    words = ("-n", "2", "-d", "2", "--compile", "auto", str(script(_PROGRAM)))
    bits, loads = _bits_and_loads(tmp_path / "once", *words)
    assert bits[0][1:] == bits[1][1:]
    has_bound_itself = len(loads[0]) > 1  # where there are two cores
    assert loads[0] == ["free loads: ", "bound loads: "][: 1 + has_bound_itself]
    assert loads[1] == [f"free loads: {_ALL}, large", "bound loads: loop 1, loop 2"][: 1 + has_bound_itself]


# Rank 0 has compiled the program, but says so only once the others are done.
_STANDS_STILL = """
import os, sys, time
import jax
from jaxrun_runtime.compile_cache.shared_programs import SharedPrograms

rank = jax.process_index()
done, stands_still = sys.argv[1:]
if rank == 0:
    write = SharedPrograms.write
    def write_late(self, key, content):
        open(stands_still, "w").close()
        while not os.path.exists(done):
            time.sleep(0.05)
        write(self, key, content)
    SharedPrograms.write = write_late
else:
    while not os.path.exists(stands_still):
        time.sleep(0.05)
assert jax.jit(lambda x: x * 2)(3) == 6
if rank:
    open(done, "w").close()
print("compiled", flush=True)
time.sleep(1000)
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_rank_that_stands_still_holds_up_nobody_and_nothing_is_left_when_the_launcher_is_killed(
    tmp_path: Path, script
) -> None:
    arguments = (str(script(_STANDS_STILL)), str(tmp_path / "done"), str(tmp_path / "stands-still"))
    with started(tmp_path, "-n", "2", "--compile", "auto", *arguments) as job:
        job.wait_for_output("compiled", 2)
        assert _shared(job)
        os.kill(job.process.pid, signal.SIGKILL)
        wait_until(lambda: not _shared(job))


# ---- --compile-cache

# Compiles programs of one rank and of all, and prints how many this rank has found in the cache.
_CACHED = """
import collections, os, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))

def damaged(x):
    return x - 1

devices = np.array(jax.devices())
over_all = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
x = jax.make_array_from_callback((devices.size * 4,), over_all, lambda index: np.arange(devices.size * 4.0)[index])
total = float(jax.jit(lambda x: jnp.sin(x).sum())(x))
local = NamedSharding(Mesh(np.array(jax.local_devices()), ("x",)), PartitionSpec("x"))
own = float(jax.jit(lambda x: jnp.cos(x).sum())(jax.device_put(np.arange(8.0), local)))
assert jax.jit(damaged)(3) == 2
print(f"values {total:.4f} {own:.4f}")
print("missed", counts["compile_requests_use_cache"] - counts["cache_hits"])
if jax.process_index() == 0 and len(os.sched_getaffinity(0)) > 1:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = []
    for _ in range(2):
        jax.clear_caches()
        before = counts["cache_hits"]
        jax.jit(damaged)(3)
        found.append(counts["cache_hits"] - before)
    print("with fewer cores {}, and again {}".format(*found))
"""


@pytest.mark.jax_version
def test_the_second_job_finds_every_file_except_a_damaged_one_which_it_replaces(tmp_path: Path, script) -> None:
    cache = tmp_path / "cache"
    words = ("-n", "2", "-d", "2", "--simulate-hosts", "2", "--compile-cache", str(cache), str(script(_CACHED)))
    outputs, damaged = [], []
    for number in ("1", "2"):
        for entry in damaged:
            entry.write_bytes(entry.read_bytes()[:100])
        (tmp_path / number).mkdir()
        result = jaxrun(tmp_path / number, *words)
        assert result.code == 0, result
        outputs.append(result.out)
        damaged = sorted(cache.glob("jit_damaged-*-cache"))
    assert damaged and all(len(entry.read_bytes()) > 100 for entry in damaged)
    assert len(set(re.findall(r"values .*", "".join(outputs)))) == 1
    first, second = ([int(missed) for missed in re.findall(r"missed (\d+)", output)] for output in outputs)
    assert sum(first) >= 4  # of either rank, if the other one was faster
    assert len(second) == 2 and max(second) == 1, outputs
    # Code for more cores is not loaded.
    found = re.findall(r"with fewer cores (\d), and again (\d)", outputs[0])
    assert found == [("0", "1")] * (len(os.sched_getaffinity(0)) > 1), outputs


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "p.py").touch()
    result = jaxrun(tmp_path, "-n", "1", "--compile-cache", "cache", "p.py")
    assert result.code == 2 and not result.run_dir.exists()
    assert "others can write to it, and what is in it is executed; try chmod go-w; name another directory" in result.err
