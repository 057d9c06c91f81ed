"""Programs across real processes: those that jaxrun ships, pytest, and what jaxrun notices of one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TIME_LIMIT, Result, jaxrun, started

SETS = """\
import atexit
import importlib.util
import os
import sys

if os.environ.get("JAXRUN_RANK") == "1":  # this rank never imports jax
    atexit.register(lambda: print("end", "jax" in sys.modules))
    sys.exit()
os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("JAX_DEBUG_NANS", "True")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath("cache")
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "3"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_OF_MY_OWN"] = "x"
print("found", "jax" in sys.modules, importlib.util.find_spec("jax") is not None)
from jax.numpy import ones
import jax

os.environ["JAX_LOG_COMPILES"] = "1"  # too late under python, too
names = "enable_x64 debug_nans compilation_cache_dir default_matmul_precision traceback_in_locations_limit "
names += "persistent_cache_min_compile_time_secs numpy_dtype_promotion log_compiles"
print("read", ones(3).dtype, *(getattr(jax.config, f"jax_{name}") for name in names.split()))
"""
LATE = """\
import os
import helper
pid = os.fork()
if pid == 0:
    os.environ["XLA_FLAGS"] = "--xla_of_a_child"
    os._exit(0)
os.waitpid(pid, 0)
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "mpi"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
helper.set_host_device_count(8)
print("devices", jax.local_device_count())
jax.config.update("jax_platforms", "cpu")  # as it is
jax.config.update("jax_platforms", "cuda")
jax.config.update("jax_cpu_collectives_implementation", "mpi")
jax.config.update("jax_enable_x64", False)
with jax.disable_jit():
    jax.config.update("jax_disable_jit", True)  # said once
"""
HELPER = """\
import os

def set_host_device_count(count):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
"""


def read_lines(path: Path, *starts: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(starts)]


@pytest.mark.extended
@pytest.mark.jax_version
def test_options_are_set_as_by_python_and_a_rank_without_jax_ends_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text(SETS)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
    as_python = subprocess.run(
        [sys.executable, "sets.py"], cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    result = jaxrun(tmp_path, "-n", "2", "sets.py")
    assert result.code == 0 and "too late" not in result.err, result
    assert read_lines(result.run_dir / "rank-0000.out", "found", "read") == as_python
    assert "end True" in read_lines(result.run_dir / "rank-0001.out", "end")
    assert as_python[0] == "found False True" and "float64 True True" in as_python[1]


@pytest.mark.jax_version
def test_a_setting_made_too_late_is_reported_once_with_its_line_and_jaxruns_option(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "helper.py").write_text(HELPER)
    result = jaxrun(tmp_path, "-n", "2", "late.py")
    assert result.code == 0, result
    assert read_lines(result.run_dir / "rank-0000.err", "jaxrun:") == [
        "jaxrun: late.py:8 sets JAX_CPU_COLLECTIVES_IMPLEMENTATION, which JAX has read already; too late here: "
        "use --env JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi",
        "jaxrun: helper.py:4 sets XLA_FLAGS, which JAX has read already; too late here: use -d 8",
        "jaxrun: late.py:14 sets jax_platforms, which JAX has read already; too late here: use --platform cuda",
        "jaxrun: late.py:15 sets jax_cpu_collectives_implementation, which JAX has read already; too late here: "
        "use --env JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi",
        "jaxrun: late.py:17 sets jax_disable_jit, so JAX ignores the shardings of jit: calls between the ranks "
        "silently return wrong results, for example process_allgather returns the rank's own part; use it only with "
        "-n 1",
    ]
    assert read_lines(result.run_dir / "rank-0001.err", "jaxrun:") == []
    assert result.out.count("devices 1") == 2


@pytest.mark.extended
@pytest.mark.jax_version
def test_what_orbax_saves_in_the_background_is_reported_once_it_is_complete(tmp_path: Path, script) -> None:
    pytest.importorskip("orbax.checkpoint")
    program = script("""
import os, time
import numpy as np
import orbax.checkpoint as ocp
manager = ocp.CheckpointManager(os.path.abspath("state"))
manager.save(3, args=ocp.args.StandardSave({"x": np.arange(4.0)}))
while not os.path.exists("go-on"):
    time.sleep(0.01)
manager.save(5, args=ocp.args.StandardSave({"x": np.arange(4.0)}))
manager.close()
""")
    with started(tmp_path, "-n", "2", str(program)) as job:
        job.wait_for_event("CheckpointSaved")
        assert (tmp_path / "state" / "3").is_dir()
        (tmp_path / "go-on").touch()
        result = job.result()
    assert result.code == 0, result
    assert [(event["rank"], event["step"]) for event in result.events("CheckpointSaved")] == [(0, 3), (0, 5)]


# ---- profiles of the program's own

PROFILES = """\
import jax
import jax.numpy as jnp
from jax.experimental.multihost_utils import sync_global_devices

for directory, more in (("first", {}), ("second", {"create_perfetto_trace": True})):
    jax.profiler.start_trace(directory, **more)
    jnp.ones((8, 8)).sum().block_until_ready()
    sync_global_devices(directory)
    jax.profiler.stop_trace()
with jax.profiler.trace("third"):
    sync_global_devices("third")
"""


@pytest.mark.extended
@pytest.mark.jax_version
def test_each_ranks_own_profile_has_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "profiles.py").write_text(PROFILES)
    result = jaxrun(tmp_path, "-n", "2", "profiles.py")
    assert result.code == 0, result
    for directory, count in (("first", 1), ("second", 2), ("third", 1)):
        names = [path.name for path in (tmp_path / directory).glob("plugins/profile/*/*")]
        of_first = [name for name in names if not name.startswith("rank-")]
        assert sorted(name for name in names if name not in of_first) == sorted(f"rank-0001-{n}" for n in of_first)
        assert len([name for name in of_first if name.endswith(".xplane.pb")]) == 1
        assert len([name for name in of_first if name.endswith(".json.gz")]) == count
        assert [path.name for path in (tmp_path / directory).iterdir()] == ["plugins"]  # and no draft


# ---- children that the program forks: they end by SIGTERM and crash on their own account

FORKING = """\
import multiprocessing, os, signal, time

import jax
from jax.experimental import multihost_utils


def fork_and_signal(number):
    pid = os.fork()
    if pid == 0:
        while True:  # in one long sleep: Python runs no handler of a signal that comes just before the system call
            time.sleep(0.01)
    os.kill(pid, number)  # as soon as it exists
    return os.waitpid(pid, 0)[1]


def fork_and_crash():
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(pid, 0)


def main():
    multihost_utils.sync_global_devices("start")
    ended = {os.WTERMSIG(fork_and_signal(signal.SIGTERM)) for _ in range(20)}
    print(f"ended by {sorted(ended)}", flush=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(f"mapped {pool.map(abs, [-1, -2])}", flush=True)
    fork_and_crash()
    if jax.process_index() == 1:
        # The program's own handler of SIGTERM is the children's, too, as under `python`.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
        print(f"exited with {os.waitstatus_to_exitcode(fork_and_signal(signal.SIGTERM))}", flush=True)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print("waiting", flush=True)
            pool.map(time.sleep, [600])
    multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main()
"""


@pytest.mark.extended
def test_children_end_by_sigterm_and_a_wait_for_one_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    with started(tmp_path, "-n", "2", "forking.py") as job:
        job.wait_for_output("ended by [15]", 2)
        job.wait_for_output("mapped [1, 2]", 2)
        job.wait_for_output("exited with 7")
        job.wait_for_output("waiting")
        command = [sys.executable, "-m", "jaxrun", "stacks", str(job.run_dir)]
        text = ""

        def is_named() -> bool:
            nonlocal text
            text = " ".join(subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT).stdout.split())
            return "use spawn or forkserver" in text

        job.wait_until(is_named, "the stack of a wait for a child")
        assert "rank 1 waits for data (multiprocessing.map)" in text
        for _ in range(2):
            job.process.send_signal(signal.SIGINT)
        job.result()
    assert "Segmentation fault" in (job.run_dir / "rank-0001.err").read_text()


# ---- those that jaxrun ships, pytest, and one that runs ahead of its results

PROGRAMS = "jaxrun_runtime.programs"


def besides(err: str) -> list[str]:
    """The lines of jaxrun other than that the job starts and ends, perhaps slowly."""
    ours = (line for line in err.splitlines() if not line.startswith("["))
    usual = r"jaxrun: (\d process|run dir|starting:|joining:|waiting for ranks? [\d-]+ to end|done in)"
    return [line for line in ours if not re.match(usual, line)]


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_loop_of_collectives_may_run_ahead_of_its_results_and_is_in_step(tmp_path: Path) -> None:
    # With fewer threads than XLA needs for its simulated devices, JAX 0.8 and 0.10 hang here for ever.
    program = tmp_path / "ahead.py"
    program.write_text(
        "import jax\nimport numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "devices = np.array(jax.devices())\n"
        "mesh = Mesh(devices, ('i',))\n"
        "ones = lambda index: np.ones(devices.size)[index]\n"
        "x = jax.make_array_from_callback(devices.shape, NamedSharding(mesh, P('i')), ones)\n"
        "mean = lambda x: jax.lax.psum(x, 'i') / devices.size\n"
        "step = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=P('i'), out_specs=P('i')))\n"
        "for _ in range(400):\n    x = step(x)\n"
        "print('means', [float(shard.data[0]) for shard in x.addressable_shards])\n"
    )
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "--timeout", "200", str(program))
    remarks = [line for line in besides(result.err) if "came last" not in line]  # as a rank does on a busy machine
    assert (result.code, result.verdict()["divergence"], remarks) == (0, "", []), result
    assert result.out.count("means [1.0, 1.0]") == 2


@pytest.mark.extended
def test_pytest_is_a_program_where_warnings_are_errors_with_strict_lockstep(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n"
        "    from jax.experimental.multihost_utils import sync_global_devices\n"
        "    sync_global_devices('here')\n"
    )
    environ = {"PYTEST_ADDOPTS": "-p no:hypothesispytest"}  # a second less
    result = jaxrun(tmp_path, "-n", "2", "--lockstep", "strict", "-m", "pytest", "-q", env=environ)
    assert (result.code, result.verdict()["divergence"]) == (0, ""), result
    assert result.out.count("1 passed") == 2, result
    assert not besides(result.err)


@pytest.mark.extended
def test_the_workers_of_xdist_are_refused_because_they_would_not_be_ranks(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    result = jaxrun(tmp_path, "-n", "2", "-m", "pytest", "-q", "-n", "2")
    assert result.code == pytest.ExitCode.USAGE_ERROR, result
    assert "ERROR: the workers of pytest-xdist (-n) would be no ranks of this job" in result.err + result.out
    assert "Traceback" not in result.err


@pytest.mark.extended
@pytest.mark.parametrize(("size", "line"), [(2, "jaxrun: the environment sets jax_disable_jit"), (1, "")])
def test_a_disabled_jit_is_reported_at_the_start(tmp_path: Path, size: int, line: str) -> None:
    (tmp_path / "empty.py").write_text("")
    result = jaxrun(tmp_path, "-n", str(size), "empty.py", env={"JAX_DISABLE_JIT": "1"})
    told = read_lines(result.run_dir / "rank-0000.err", "jaxrun:")
    assert (result.code, [text[: len(line)] for text in told]) == (0, [line] if line else []), result


@pytest.mark.extended
def test_training_ends_with_the_same_bits_after_sigterm_a_killed_rank_and_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    train = ("-n", "2", "-m", f"{PROGRAMS}.train")
    length = ("--steps", "120", "--save-every", "30")

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    def parameters(result: Result) -> str:
        found = re.search(r"parameters (\w{16}) after 120 steps", result.out)
        assert result.code == 0 and found is not None, result
        return found[1]

    undisturbed = parameters(jaxrun(folder("undisturbed"), *train, "state", *length))
    state = str(tmp_path / "state")
    with started(folder("stopped"), *train, state, *length, "--step-time", "0.5") as job:
        job.wait_for_event("StopPolled", 2)
        job.process.send_signal(signal.SIGTERM)
        stopped = job.result()
    assert stopped.code == 75, stopped
    found = re.search(r"stopped after step (\d+), and saved it", stopped.out)
    assert found is not None and f"may be resumed from step {found[1]}." in str(stopped.verdict()["headline"])
    assert stopped.events("CheckpointSaved")[-1]["step"] == int(found[1])

    faults = ("--max-restarts", "2", "--chaos", f"kill:{random.randrange(2)}@{random.uniform(0.2, 1.5):.1f}s")
    resumed = jaxrun(folder("resumed"), *faults, *train, state, *length, "--step-time", "0.05")
    assert f"continues after step {found[1]}, bit for bit" in resumed.out
    assert "killed by SIGKILL (9), as --chaos asked" in resumed.err
    assert parameters(resumed) == undisturbed
