"""What programs of JAX's are given on several hosts: shared compiled programs, a stop in time, a debugger; and what
is seen of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import HOSTS, TESTBED, Bed, JobRunner
from launch_modes import LAUNCHED, OPEN_MPI_5, PYTHON, LaunchMode
from terminals import TerminalSession

MakeRunner = Callable[[LaunchMode], JobRunner]
# Programs that the ranks of a host have in common: of all ranks, of one rank, of its last device alone. In the second
# attempt each rank leaves rank-R.json: of each program how often it has loaded it from another, and its result, bit for
# bit; and what is in this host's memory. In the first, each rank of the second host is killed once it has compiled the
# second program, before it gives that to the other.
COMPILES = """
import hashlib, json, os, signal
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxrun_runtime as jr
from jaxrun_runtime.compile_cache.shared_programs import SharedPrograms

loaded, is_fatal = 0, False

def count(event, **_):
    global loaded
    loaded += event == "/jaxrun/compile_once/loaded"

def write(self, key, content, give=SharedPrograms.write):
    if is_fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    give(self, key, content)

jax.monitoring.register_event_listener(count)
SharedPrograms.write = write
dies = jr.attempt().number == 1 and jr.rank >= jr.size // 2
outcome = {"loaded": {}, "bits": {}}
mesh = Mesh(np.array(jax.devices()), ("x",))
values = np.linspace(0, 1, jax.device_count() * 4, dtype=np.float32)
everywhere = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda index: values[index])
here = jax.device_put(values)
on_last = jax.device_put(values, jax.local_devices()[-1])

for name, function, x in (
    ("sum of all ranks", lambda x: jnp.sin(x).sum(), everywhere),
    ("product", lambda x: jnp.tanh(jnp.outer(x, x)) @ x, here),
    ("by LAPACK", lambda x: jnp.linalg.svd(jnp.outer(x, x) + jnp.eye(x.size))[1], on_last),
):
    is_fatal = dies and name == "product"
    before = loaded
    result = np.asarray(jax.jit(function)(x).addressable_data(0))
    outcome["loaded"][name] = loaded - before
    outcome["bits"][name] = hashlib.sha256(result.tobytes()).hexdigest()
outcome["in_memory"] = sorted(os.listdir(f"/dev/shm/jaxrun-{os.geteuid()}"))
Path(f"rank-{jr.rank}.json").write_text(json.dumps(outcome))
"""
BREAKS = """
import jax
from jax.experimental import multihost_utils
secret = 40 + jax.process_index()
if secret == 42:
    breakpoint()
multihost_utils.sync_global_devices("end")
input("name? ")
"""


@pytest.mark.extended
def test_each_host_compiles_once_and_shares_nothing_with_an_attempt_that_was_killed_meanwhile(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    (tmp_path / "compiles.py").write_text(COMPILES)
    runner, ranks_on = make_runner(LaunchMode(OPEN_MPI_5, LAUNCHED)), ("h1", "h1", "h2", "h2")
    words = ("-d", "2", "--compile", "auto", "--max-restarts", "1", "-v", "compiles.py")
    result = runner.jaxrun(*words, ranks_on=ranks_on)
    assert result.code == 0 and "could not load" not in result.err, result
    assert "attempt 1 of 2 failed" in result.err and "on h2 was killed by SIGKILL (9)" in result.err, result
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    for first, second in (ranks[:2], ranks[2:]):
        times = {name: {first["loaded"][name], second["loaded"][name]} for name in first["loaded"]}
        assert times == {name: {0, 1} for name in times}, (first, second)
    assert all(rank["bits"] == ranks[0]["bits"] for rank in ranks), ranks  # loaded or compiled, on either host
    job_id = json.loads((result.run_dir / "job.json").read_text())["job_id"]
    assert [rank["in_memory"] for rank in ranks] == [[f"{job_id}-2-{host}"] for host in ranks_on]
    assert not [name for host in ("h1", "h2") for name in shared_on(runner.bed, host)]


def shared_on(bed: Bed, host: str) -> list[str]:
    return [name for name in bed.inside(host, "ls", "/dev/shm").split() if name.startswith("jaxrun")]


@pytest.mark.extended
def test_a_rank_on_another_host_gets_the_terminal(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(LaunchMode(OPEN_MPI_5, LAUNCHED))
    (tmp_path / "stop.py").write_text(BREAKS)
    words = runner.mode.command(HOSTS, "--no-run-dir", str(tmp_path / "stop.py"))
    command = [str(TESTBED), "exec", runner.mode.host, "--", *words]
    with TerminalSession(tmp_path, command=command, env={"JAXRUN_TESTBED_DIR": str(runner.bed.root)}) as terminal:
        terminal.wait_for(">>> rank 2 (h3) is in its debugger at stop.py:6")
        for typed, shown in (("p secret", "42\n"), ("p secret * 10", "420\n")):
            terminal.wait_for("(Pdb) ")
            terminal.type(f"{typed}\n")
            terminal.wait_for(shown)
        terminal.wait_for("(Pdb) ")
        terminal.type("c\n")
        assert terminal.end() == 1, terminal.text
    assert "one rank has jaxrun's standard input" in terminal.text


# ---- what is seen of a job: `jaxrun top`, a profile, and one timeline, whose clocks are compared

MPIRUN = LaunchMode(OPEN_MPI_5, LAUNCHED)
LATE = """
import time, jax
from jax.experimental import multihost_utils
print("ready", flush=True)
for step in range(10):
    multihost_utils.sync_global_devices(f"step {step}")
print("ten steps", flush=True)
if jax.process_index() == 1:
    time.sleep(1000)
multihost_utils.sync_global_devices("never")
"""
PROFILED = """
import os, time, jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
spread = lambda part: jax.make_array_from_process_local_data(split, np.float32(part))

@jax.jit
def step(x, stop):
    return x + x.mean(), stop.max()

rows, stop = spread(np.ones((2, 8))), False
print("ready", flush=True)
while not stop:
    time.sleep(0.005)
    rows, wanted = step(rows, spread([os.path.exists("stop")]))
    stop = float(wanted) > 0  # the ranks agree on it
"""


@pytest.mark.extended
def test_each_rank_has_a_row_with_its_host_and_the_late_one_comes_first(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    with make_runner(MPIRUN).started(str(tmp_path / "late.py")) as job:
        job.wait_for_output("ten steps")
        text = ""

        def is_late() -> bool:
            nonlocal text
            text = job.bed.inside(MPIRUN.host, PYTHON, "-m", "jaxrun", "top", str(job.run_dir))
            waits = re.findall(r"^  \d +h\d +waits ", text, re.MULTILINE)  # not late themselves
            return len(waits) == 2 and bool(re.search(r"^! 1 ", text, re.MULTILINE))

        job.wait_until(is_late, "rank for which the others wait")
        rows = [line.split() for line in text.splitlines() if re.match(r"[! ] \d", line)]
        assert [row[:4] for row in rows[:1]] == [["!", "1", "h2", "sleeps"]]
        assert [row[:3] for row in rows[1:]] == [["0", "h1", "waits"], ["2", "h3", "waits"]], text
        assert "3 ranks on 3 hosts" in text and all(row[-2:] == ["ten", "steps"] for row in rows), text
        assert len(re.findall(r" \d+%  +\d+M  ", text)) == 3, text


@pytest.mark.extended
def test_ranks_of_three_hosts_have_one_profile_and_one_timeline(make_runner: MakeRunner, tmp_path: Path) -> None:
    (tmp_path / "profiled.py").write_text(PROFILED)
    with make_runner(MPIRUN).started(str(tmp_path / "profiled.py")) as job:
        job.wait_for_output("ready")
        command = ("-m", "jaxrun", "profile", "--steps", "3", str(job.run_dir))
        text = job.bed.inside(MPIRUN.host, PYTHON, *command)
        assert "of ranks 0-2 ..." in text and "3 profiles, " in text
        (job.directory / "stop").touch()
        result = job.result()
        assert result.code == 0, result
    (session,) = (result.run_dir / "profile/plugins/profile").iterdir()
    names = [f"rank-{rank:04d}-{host}.xplane.pb" for rank, host in enumerate(HOSTS)]
    assert sorted(file.name for file in session.iterdir()) == names

    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    files = ("--trace", str(trace), "--html", str(page))
    subprocess.run([sys.executable, "-m", "jaxrun", "explain", *files, str(result.run_dir)], check=True)
    events = json.loads(trace.read_text())["traceEvents"]
    for rank, host in enumerate(HOSTS):
        of_rank = [event for event in events if event["pid"] == rank + 1]
        assert of_rank[0]["args"] == {"name": f"rank {rank} ({host})"}
        slices = {event["name"] for event in of_rank if event["ph"] == "X"}
        assert {"find the devices", "program", "jit(step)", "compile jit(step)", "JAX profile"} <= slices
    # All end after the same call: on one clock, within less than the time that the job has taken.
    ends = {event["pid"]: event["ts"] + event["dur"] for event in events if event["name"] == "JAX profile"}
    assert max(ends.values()) - min(ends.values()) < 60e6
    assert "The clocks of the hosts are compared to within " in page.read_text()
