"""--compile once: one rank of each host compiles, the others load, and one that stands still holds up nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT, Job, Result, jaxrun, started

from jaxrun import Gang, GangStartError

pytestmark = pytest.mark.jax_version

# Prints its results, bit for bit; which programs this rank has loaded; and that what was loaded can be serialized.
_PROGRAM = """
import hashlib, os, sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

loaded = 0
def count(event, **_):
    global loaded
    loaded += event == "/jaxrun/compile_once/loaded"
jax.monitoring.register_event_listener(count)

rank = jax.process_index()
devices = np.array(jax.devices())
mesh = Mesh(devices, ("x",))
values = np.linspace(0, 1, devices.size * 4, dtype=np.float32)
x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda index: values[index])
own = jax.device_put(values, jax.local_devices()[-1])
results = [
    jax.jit(lambda x: jnp.sin(x).sum())(x),  # over all ranks
    jax.jit(lambda x: jnp.cos(x)[::-1], out_shardings=NamedSharding(mesh, P("x")))(x),
    jax.jit(lambda x: jnp.tanh(jnp.outer(x, x)))(own),  # of one rank, on its last device
    jax.jit(jnp.linalg.svd)(jnp.outer(own, own))[1],  # by LAPACK
]
bits = [np.asarray(result.addressable_data(0)).tobytes() for result in results]
print("bits", hashlib.sha256(bits[0] + bits[2] + bits[3]).hexdigest())
called = jax.jit(lambda x: jax.pure_callback(lambda y: y + rank, jax.ShapeDtypeStruct((), "f"), x))(np.float32(1))
assert called == 1 + rank
ahead = jax.jit(lambda x: jnp.exp(x) - 1).lower(own).compile()
again = serialize_executable.deserialize_and_load(
    *serialize_executable.serialize(ahead), **({"execution_devices": jax.local_devices()[-1:]} if "execution_devices"
    in serialize_executable.deserialize_and_load.__code__.co_varnames else {}))
assert (np.asarray(again(own)) == np.asarray(ahead(own))).all()
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("loaded", loaded)
"""


def _shared(job: Job | Result) -> list[str]:
    job_id = json.loads((job.run_dir / "job.json").read_text())["job_id"]
    own = Path(f"/dev/shm/jaxrun-{os.geteuid()}")
    return [path.name for path in own.iterdir() if job_id in path.name] if own.exists() else []


def _numbers(result: Result, word: str) -> list[str]:
    return re.findall(rf"\b{word} (\w+)", result.out)


def test_results_are_those_of_each_and_all_but_one_rank_of_a_host_load(tmp_path: Path, script) -> None:
    program, found = str(script(_PROGRAM)), {}
    for how in ("each", "once"):
        (tmp_path / how).mkdir()
        result = jaxrun(tmp_path / how, "-n", "4", "-d", "2", "--simulate-hosts", "2", "--compile", how, "-v", program)
        assert result.code == 0, result
        assert not _shared(result) and "could not load" not in result.err, result.err
        found[how] = set(_numbers(result, "bits")), sum(map(int, _numbers(result, "loaded")))
    assert found["each"][0] == found["once"][0] and len(found["once"][0]) == 1, found
    assert found["each"][1] == 0
    assert found["once"][1] >= 2 * 5  # on each of two hosts: four programs that are called, and one ahead of time


# XLA splits these loops into parts, at most one a core. At the end of a part, other instructions round otherwise.
_SPLIT_LOOPS = """
import hashlib, os
import jax
import jax.numpy as jnp
import numpy as np

for cores in (os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}):
    os.sched_setaffinity(0, cores)
    jax.clear_caches()
    for size in (1_000_003, 1_000_005):
        x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        y = jax.jit(lambda x: jnp.exp(x) * jnp.log1p(jnp.abs(x)) / jnp.sqrt(1 + x * x))(x)
        print("bits", hashlib.sha256(np.asarray(y).tobytes()).hexdigest(), flush=True)
"""


@pytest.mark.parametrize(("ranks", "devices"), [(2, 1), (2, 2)])
def test_loops_are_split_as_each_rank_would_split_them(tmp_path: Path, script, ranks: int, devices: int) -> None:
    found = []
    for how in ("each", "once"):
        (tmp_path / how).mkdir()
        arguments = ("-n", str(ranks), "-d", str(devices), "--compile", how, str(script(_SPLIT_LOOPS)))
        result = jaxrun(tmp_path / how, *arguments)
        assert result.code == 0, result
        found.append(
            [re.findall(r"bits (\w+)", path.read_text()) for path in sorted(result.run_dir.glob("rank-*.out"))]
        )
    assert found[0] == found[1] and len(found[0]) == ranks and all(len(bits) == 4 for bits in found[0])


# A program of some kilobytes, and one of more than a quarter of a MiB.
_TWO_SIZES = """
import jax
import numpy as np
loaded = []
def count(event, **_):
    if event == "/jaxrun/compile_once/loaded":
        loaded.append(event)
jax.monitoring.register_event_listener(count)
table = np.random.default_rng(0).random(100_000, dtype=np.float32)
for name, function in (("small", lambda x: x + 1), ("large", lambda x: x + table)):
    loaded.clear()
    jax.jit(function)(np.float32(1))
    print(name, len(loaded))
"""


@pytest.mark.parametrize(("words", "shares_large"), [((), True), (("--compile-memory", "1"), False)])
def test_a_quarter_of_the_memory_is_for_one_program_at_most(
    tmp_path: Path, script, words: tuple[str, ...], shares_large: bool
) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--compile", "once", *words, str(script(_TWO_SIZES)))
    assert result.code == 0, result
    assert sorted(_numbers(result, "small")) == ["0", "1"]
    assert sorted(_numbers(result, "large")) == ["0", "1" if shares_large else "0"]


# Rank 0 has compiled `first`, but says so only once the others are done.
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
print("done", flush=True)
if rank:
    open(done, "w").close()
"""


def test_a_rank_that_stands_still_while_it_compiles_holds_up_nobody(tmp_path: Path, script) -> None:
    arguments = (str(script(_STANDS_STILL)), str(tmp_path / "done"), str(tmp_path / "stands-still"))
    result = jaxrun(tmp_path, "-n", "2", "--compile", "once", *arguments)
    assert result.code == 0 and result.out.count("done") == 2, result


_WAITS_FOR_EVER = """
import time
import jax
jax.jit(lambda x: x * 2)(3)
print("compiled", flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path, script) -> None:
    with started(tmp_path, "-n", "2", "--compile", "once", str(script(_WAITS_FOR_EVER))) as job:
        job.wait_for_output("compiled", 2)
        assert _shared(job)
        os.kill(job.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + TIME_LIMIT
        while _shared(job) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _shared(job)


def test_on_gpus_a_gang_is_refused_as_a_job_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-11111111-0000-0000-0000-000000000000)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(GangStartError, match="--compile once is for cpu: sharing was not tried on cuda") as refused:
        Gang(1, options="--compile once")
    assert refused.value.exit_code == 2
