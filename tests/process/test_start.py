"""Bringing a job together: what is proved before the program's first line, and the traps on the way there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from harness import MADE_NVML, Result, jaxrun

SHOW = """\
import json, multiprocessing, os, socket, sys
import numpy as np

def square(x):
    return x * x

def main():
    import jax, jaxrun_runtime as jr
    from jax.experimental import multihost_utils
    from jax._src import distributed
    jax.distributed.initialize()  # as a program does that knows nothing of jaxrun
    total = int(np.sum(multihost_utils.process_allgather(np.array([jax.process_index() + 1]))))
    by_pmap = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(np.ones(jax.local_device_count()))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [1, 2, 3])
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "total": total, "rank": jr.rank, "size": jr.size,
        "local_rank": jr.local_rank, "host": jr.host, "main": jr.is_main, "run_dir": str(jr.run_dir),
        "hostname": socket.gethostname(), "boot_id": open("/proc/sys/kernel/random/boot_id").read().strip(),
        "process": [jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()],
        "env": {k: os.environ.get(k) for k in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")},
        "partition": distributed.global_state.partition_index, "squares": squares, "pmap": float(by_pmap[0]),
        "shown": [open(f"/proc/self/{name}").read().rstrip("\\0\\n") for name in ("comm", "cmdline")],
        "hash": hash("text"), "numbers": [np.random.random()], "stdin": sys.stdin.read(),
    }))

if __name__ == "__main__":
    main()
"""
DEAD_PROXIES = dict.fromkeys(
    ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy"), "http://127.0.0.1:9"
)

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


def show(folder: Path, text: str, *options: str, **more: Any) -> tuple[list[dict[str, Any]], Result]:
    """Run this text under jaxrun with two ranks; what each prints, by rank."""
    (folder / "show.py").write_text(text)
    words = ("-n", "2", "-d", "2", *options, str(folder / "show.py"), "a b", "--flag", "--", "ü\n")
    result = jaxrun(folder, *words, **more)
    assert result.code == 0, result.err
    logs = sorted(result.run_dir.glob("rank-*.out"))
    seen = [json.loads(next(line for line in log.read_text().splitlines() if line.startswith("{"))) for log in logs]
    assert [one["rank"] for one in seen] == [0, 1]
    return seen, result


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """On two simulated hosts, below other launchers, behind proxies, with an input."""
    folder = tmp_path_factory.mktemp("forked")
    (folder / "input").write_text("two\nlines")
    with (folder / "input").open() as file:
        given = STALE | DEAD_PROXIES | {"JAX_PARTITION_INDEX": "3"}
        return show(folder, SHOW, "--simulate-hosts", "2", stdin=file, env=given)[0]


@pytest.mark.jax_version
def test_the_program_finds_itself_in_a_joined_job(forked: list[dict[str, Any]]) -> None:
    check_identity(forked)
    assert [one["squares"] for one in forked] == [[1, 4, 9]] * 2  # by processes of its own


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_program_that_requests_fresh_interpreters_finds_the_same(tmp_path: Path) -> None:
    seen, result = show(tmp_path, f"# jaxrun: no-fork\n{SHOW}", "-v")
    check_identity(seen)
    assert "fresh interpreter" in result.err
    assert [one["local_rank"] for one in seen] == [0, 1]


def check_identity(seen: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(seen):
        assert one["process"] == [rank, 2, 2, 4]
        assert (one["total"], one["pmap"]) == (3, 4.0)
        folder = one["path"]
        assert one["argv"] == [f"{folder}/show.py", "a b", "--flag", "--", "ü\n"]
        assert (one["name"], one["size"], one["main"], one["run_dir"]) == ("__main__", 2, rank == 0, f"{folder}/run")
        assert one["shown"] == [f"jaxrun rank {rank}", f"jaxrun rank {rank}: show.py"]
        assert (one["env"]["JAX_NUM_PROCESSES"], one["env"]["JAX_PROCESS_ID"]) == ("2", str(rank))
        assert one["env"]["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert len({one["hash"] for one in seen}) == 1
    assert len({str(one["numbers"]) for one in seen}) == 2


@pytest.mark.jax_version
def test_other_launchers_variables_do_no_harm_and_standard_input_belongs_to_rank_0(
    forked: list[dict[str, Any]],
) -> None:
    assert [one["stdin"] for one in forked] == ["two\nlines", ""]
    assert [one["partition"] for one in forked] == [3, 3]


@pytest.mark.jax_version
def test_simulated_hosts_differ_in_name_and_boot_id(forked: list[dict[str, Any]]) -> None:
    assert [one["host"] for one in forked] == [one["hostname"] for one in forked] == ["h1", "h2"]
    assert [one["local_rank"] for one in forked] == [0, 0]
    assert forked[0]["boot_id"] != forked[1]["boot_id"]


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


@pytest.mark.extended
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
    assert result.err.count("a mesh over 2 hosts") == refuses_several_hosts()
    if refuses_several_hosts():
        assert "data=2 x model=2; data goes across the hosts, model stays within a host" in result.err


@pytest.mark.extended
@pytest.mark.jax_version
def test_of_a_mesh_over_hosts_only_the_first_attempt_speaks(tmp_path: Path) -> None:
    program = tmp_path / "mesh.py"
    ends = "import jaxrun_runtime\nif jaxrun_runtime.attempt().number == 1:\n    raise ValueError\n"
    program.write_text(f"{MESH}{ends}")
    options = ("-n", "2", "-d", "2", "--simulate-hosts", "2", "--max-restarts", "1")
    result = jaxrun(tmp_path, *options, str(program))
    assert result.code == 0 and "1 restart" in result.err, result.err
    assert result.err.count("a mesh over 2 hosts") == refuses_several_hosts()


@pytest.mark.extended
@pytest.mark.jax_version
def test_make_mesh_can_be_left_to_jax(tmp_path: Path) -> None:
    program = tmp_path / "mesh.py"
    program.write_text(MESH)
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", "--simulate-hosts", "2", "--make-mesh", "jax", str(program))
    assert result.code == refuses_several_hosts()
    assert ("multi-slice" in result.err) == refuses_several_hosts()


# ---- jobs that do not start

OTHER_SETTINGS = """
import os
if os.environ.get("JAXRUN_RANK") == "1":
    os.environ["JAX_NUM_CPU_DEVICES"] = "3"
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true"
    import numpy
    numpy.__version__ = "1.0"
"""


def refused(tmp_path: Path, modules: dict[str, str], *options: str) -> Result:
    """Run a job of two ranks that find these modules first; its program never runs."""
    site = tmp_path / "site"
    site.mkdir()
    for name, text in modules.items():
        (site / name).write_text(text)
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = jaxrun(tmp_path, "-n", "2", *options, str(program), env={"PYTHONPATH": path})
    assert "the program ran" not in result.out
    return result


@pytest.mark.jax_version
def test_ranks_with_other_devices_settings_or_versions_are_refused_with_what_differs(tmp_path: Path) -> None:
    result = refused(tmp_path, {"sitecustomize.py": OTHER_SETTINGS}, "--no-fork")
    assert result.code == 65
    assert "rank 1 " in " ".join(result.err.split())
    assert all(word in result.err for word in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "fast_math", "numpy", "1.0")), result


# Run before jax is imported: JAX believes that there are the device files of a GPU.
DEVICE_FILES = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "jax._src.xla_bridge":
            from jax._src import hardware_utils
            hardware_utils.has_visible_nvidia_gpu = lambda: True
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("site", "code", "words"),
    [
        ("", 65, "the job asked for cuda, but JAX runs on something else"),
        (DEVICE_FILES, 69, "what this means: JAX"),
    ],
    ids=["no device file", "no plugin"],
)
def test_a_job_that_requests_gpus_never_falls_back_to_cpu(tmp_path: Path, site: str, code: int, words: str) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('the program ran')\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(site)
    path = f"{tmp_path / 'site'}:{MADE_NVML}"
    flags = ("-n", "1", "--platform", "cuda", "--no-fork")
    result = jaxrun(tmp_path, *flags, str(program), env={"PYTHONPATH": path})
    assert result.code == code, result
    assert words in " ".join(result.err.split())
    assert "the program ran" not in result.out
