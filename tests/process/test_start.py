"""Bringing a job together: what is proved before the program's first line, and the traps on the way there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import HERE, jaxrun, started

SHOW = """\
import json, os, socket, sys
import jax, jaxrun_runtime as jr
import numpy as np
from jax.experimental import multihost_utils
from jax._src import distributed
total = int(np.sum(multihost_utils.process_allgather(np.array([jax.process_index() + 1]))))
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "total": total, "rank": jr.rank, "size": jr.size,
    "local_rank": jr.local_rank, "host": jr.host, "main": jr.is_main, "run_dir": str(jr.run_dir),
    "hostname": socket.gethostname(), "boot_id": open("/proc/sys/kernel/random/boot_id").read().strip(),
    "process": [jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()],
    "env": {k: os.environ.get(k) for k in
            ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "PYTHONHASHSEED", "OMP_NUM_THREADS")},
    "partition": distributed.global_state.partition_index,
    "shown": [open(f"/proc/self/{name}").read().rstrip("\\0\\n") for name in ("comm", "cmdline")],
    "hash": hash("text"), "numbers": [np.random.random()], "stdin": sys.stdin.read(),
}))
"""

# What a shell holds that was opened in a Slurm step of four tasks, under an mpirun of Open MPI 4.
STALE = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gone[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1",
    "JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:1",
    "JAX_LOCAL_DEVICE_IDS": "7",
    "JAX_PROCESS_ID": "9",
    "JAX_NUM_PROCESSES": "12",
}


def show(tmp_path: Path, *options: str, arguments: tuple[str, ...] = (), **more: object) -> list[dict[str, object]]:
    """Run SHOW under jaxrun; what each rank prints, by rank."""
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    result = jaxrun(tmp_path, *options, str(program), *arguments, **more)  # type: ignore[arg-type]
    assert result.code == 0, result.err
    logs = sorted(result.run_dir.glob("rank-*.out"))
    seen = [json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{"))) for log in logs]
    assert [one["rank"] for one in seen] == list(range(len(seen)))
    return seen


@pytest.mark.jax_version
@pytest.mark.parametrize("fork", [(), ("--no-fork",)])
def test_the_program_finds_itself_in_a_joined_job(tmp_path: Path, fork: tuple[str, ...]) -> None:
    seen = show(tmp_path, "-n", "3", "-d", "2", *fork, arguments=("a b", "--flag", "--", "ü\n"))
    for rank, one in enumerate(seen):
        assert one["process"] == [rank, 3, 2, 6]
        assert one["total"] == 6
        assert one["argv"] == [str(tmp_path / "show.py"), "a b", "--flag", "--", "ü\n"]
        assert (one["path"], one["name"]) == (str(tmp_path), "__main__")
        assert (one["size"], one["local_rank"], one["main"]) == (3, rank, rank == 0)
        assert one["run_dir"] == str(tmp_path / "run")
        assert one["shown"] == [f"jaxrun rank {rank}", f"jaxrun rank {rank}: show.py"]
        env = one["env"]
        assert isinstance(env, dict)
        assert (env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"]) == ("3", str(rank))
        assert env["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert len({str(one["hash"]) for one in seen}) == 1
    assert len({str(one["numbers"]) for one in seen}) == 3


@pytest.mark.jax_version
def test_other_launchers_variables_and_proxies_do_no_harm_and_standard_input_belongs_to_rank_0(tmp_path: Path) -> None:
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy")
    dead = dict.fromkeys(proxies, "http://127.0.0.1:9")
    with (tmp_path / "input").open("w+") as file:
        file.write("two\nlines")
        file.seek(0)
        given = STALE | dead | {"JAX_PARTITION_INDEX": "3"}
        seen = show(tmp_path, "-n", "2", "--init-timeout", "20", stdin=file, env=given)
    assert [one["stdin"] for one in seen] == ["two\nlines", ""]
    assert [one["process"] for one in seen] == [[0, 2, 1, 2], [1, 2, 1, 2]]
    assert [one["total"] for one in seen] == [3, 3]
    assert [one["partition"] for one in seen] == [3, 3]


@pytest.mark.jax_version
def test_simulated_hosts_differ_in_name_and_boot_id(tmp_path: Path) -> None:
    seen = show(tmp_path, "-n", "4", "--simulate-hosts", "2")
    assert [one["host"] for one in seen] == ["h1", "h1", "h2", "h2"]
    assert [one["hostname"] for one in seen] == ["h1", "h1", "h2", "h2"]
    assert [one["local_rank"] for one in seen] == [0, 1, 0, 1]
    assert seen[0]["boot_id"] == seen[1]["boot_id"] != seen[2]["boot_id"] == seen[3]["boot_id"]
    assert [one["total"] for one in seen] == [10] * 4


MESH = """\
import jax
from jax import make_mesh
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

mesh = make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
print("laid", [[device.process_index for device in row] for row in mesh.devices], dict(mesh.shape))
line = jax.make_mesh((2, 1), axis_names=("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
print("types", [kind.name for kind in line.axis_types], line.size)
mine = np.full((1, 2), jax.process_index() + 1.0)
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)
print("sum", float(jax.jit(lambda x: x.sum())(rows)))
try:
    jax.make_mesh((99,), ("data",))
except ValueError as error:
    print(error)
"""


def refuses_several_hosts() -> bool:
    """Whether this JAX's own make_mesh does."""
    import jax

    return tuple(map(int, jax.__version__.split(".")[:3])) >= (0, 10, 2)


@pytest.mark.jax_version
def test_make_mesh_lays_a_mesh_over_hosts_and_says_so_once(tmp_path: Path) -> None:
    program = tmp_path / "mesh.py"
    program.write_text(MESH)
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "--simulate-hosts", "2", str(program))
    assert result.code == 0, result.err
    for rank in (0, 1):
        lines = (result.run_dir / f"rank-000{rank}.out").read_text().splitlines()
        assert [line for line in lines if not line.startswith("[Gloo]")] == [
            "laid [[0, 0], [1, 1]] {'data': 2, 'model': 2}",
            "types ['Auto', 'Auto'] 2",
            "sum 6.0",
            "Number of devices 4 must be >= the product of mesh_shape (99,)",
        ]
    assert result.err.count("mesh over 2 hosts") == refuses_several_hosts()
    if refuses_several_hosts():
        assert "[0] jaxrun: mesh over 2 hosts: data=2 x model=2, hosts along data;" in result.err


@pytest.mark.jax_version
def test_make_mesh_can_be_left_to_jax(tmp_path: Path) -> None:
    program = tmp_path / "mesh.py"
    program.write_text(MESH)
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "--simulate-hosts", "2", "--make-mesh", "jax", str(program))
    assert result.code == refuses_several_hosts()
    assert ("multi-slice" in result.err) == refuses_several_hosts()


@pytest.mark.jax_version
def test_unequal_local_device_counts_are_refused(tmp_path: Path) -> None:
    result = unequal(tmp_path, "JAX_NUM_CPU_DEVICES", "3")
    assert result.code == 65
    assert "local device counts differ" in result.err or "JAX_NUM_CPU_DEVICES" in result.err
    assert "ranks 0, 2" in result.err and "rank  1" in result.err.replace("rank 1", "rank  1")
    assert "the program ran" not in result.out


@pytest.mark.extended
def test_different_settings_are_refused_with_the_smallest_difference(tmp_path: Path) -> None:
    result = unequal(tmp_path, "XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert result.code == 65
    assert "XLA_FLAGS" in result.err and "fast_math" in result.err
    assert "the program ran" not in result.out


def unequal(tmp_path: Path, name: str, value: str):  # type: ignore[no-untyped-def]
    """Run a job in which rank 1's interpreter starts with another environment than the others'."""
    customize = f"import os\nif os.environ.get('JAXRUN_RANK') == '1':\n    os.environ[{name!r}] = {value!r}\n"
    return customized(tmp_path, customize)


def customized(tmp_path: Path, customize: str, *options: str):  # type: ignore[no-untyped-def]
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(customize)
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return jaxrun(tmp_path, "-n", "3", "--no-fork", *options, str(program), env={"PYTHONPATH": path})


@pytest.mark.extended
def test_different_versions_are_refused(tmp_path: Path) -> None:
    customize = "import os\nif os.environ.get('JAXRUN_RANK') == '2':\n    import numpy\n    numpy.__version__ = '1.0'\n"
    result = customized(tmp_path, customize)
    assert result.code == 65
    assert "numpy" in result.err and "1.0" in result.err and "rank 2" in result.err.replace("rank  2", "rank 2")


def test_a_rank_that_never_starts_is_named_within_the_init_timeout(tmp_path: Path) -> None:
    customize = "import os, time\nif os.environ.get('JAXRUN_RANK') == '1':\n    time.sleep(600)\n"
    result = customized(tmp_path, customize, "--init-timeout", "6")
    assert result.code == 69
    assert "2 of 3 ranks" in result.err and "rank 1" in result.err
    assert "the program ran" not in result.out


def test_a_rank_that_dies_at_its_start_is_named(tmp_path: Path) -> None:
    customize = "import os\nif os.environ.get('JAXRUN_RANK') == '1':\n    os._exit(5)\n"
    result = customized(tmp_path, customize)
    assert result.code != 0
    assert "rank 1" in result.err
    assert "the program ran" not in result.out


@pytest.mark.jax_version
def test_a_job_that_requests_gpus_never_falls_back_to_cpu(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-11111111-0000-0000-0000-000000000000)'\n")
    smi.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')\n")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    result = jaxrun(tmp_path, "-n", "1", "--platform", "cuda", str(program), env={"PATH": path})
    assert result.code in (65, 69), result
    assert "cuda" in result.err
    assert "the program ran" not in result.out


@pytest.mark.extended
def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        started(tmp_path / "a", "-n", "2", str(program)) as one,
        started(tmp_path / "b", "-n", "2", str(program)) as two,
    ):
        results = one.result(), two.result()
    assert [result.code for result in results] == [0, 0], results
    assert [result.out.count('"total"') for result in results] == [2, 2]


@pytest.mark.jax_version
def test_an_unmodified_program_that_initializes_jax_itself_runs(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", str(HERE / "pmap_example.py"))
    assert result.code == 0, result.err
    assert result.out.count("4.") >= 2


def test_a_program_may_start_processes_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "children.py"
    program.write_text(
        "import multiprocessing as mp, os\n"
        "def square(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(2) as pool:\n"
        "        print('squares', pool.map(square, [1, 2, 3]))\n"
    )
    result = jaxrun(tmp_path, "-n", "2", str(program))
    assert result.code == 0, result.err
    assert result.out.count("squares [1, 4, 9]") == 2


def test_a_program_can_request_fresh_interpreters(tmp_path: Path) -> None:
    program = tmp_path / "fresh.py"
    program.write_text(
        "# jaxrun: no-fork\nimport os, sys\nprint('parent', open(f'/proc/{os.getppid()}/cmdline').read())\n"
    )
    result = jaxrun(tmp_path, "-n", "2", "-v", str(program))
    assert result.code == 0
    assert "fresh interpreter" in result.err


@pytest.mark.extended
def test_threads_in_the_fork_server_make_it_decline(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'jaxrun_runtime.forkserver' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')\n")
    result = jaxrun(tmp_path, "-n", "2", str(program), env={"PYTHONPATH": str(site)})
    assert result.code == 0, result.err
    assert result.out.count("the program ran") == 2
    assert result.events("fork_declined")


def test_jax_that_cannot_be_imported_is_a_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "jax.py").write_text("raise ImportError('libfoo.so.3 is missing')\n")
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')\n")
    for options in ((), ("--no-fork",)):
        run_dir = tmp_path / f"run{len(options)}"
        command = [sys.executable, "-m", "jaxrun", "-n", "2", "--run-dir", str(run_dir), *options, str(program)]
        env = {**os.environ, "PYTHONPATH": str(broken)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 69, done
        assert "libfoo.so.3 is missing" in done.stderr
        assert "the program ran" not in done.stdout
