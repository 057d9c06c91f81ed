"""The table of engines and the engines' files agree, and hosts of a scheduler's job are used as if they were named."""

from __future__ import annotations

import pytest

from jaxrun.errors import UsageError
from jaxrun.spec.backends import BACKENDS
from jaxrun.spec.backends.planning import make_plan
from jaxrun.spec.engines import ENGINES
from jaxrun.spec.engines.lookup import all_engines, engine_of, launch_id, marked_engines
from jaxrun.spec.job.job import Job
from jaxrun_runtime.children import CLUSTER_VARIABLES

# Variables that show that a process is in a job of a scheduler, which may be no rank.
_OF_SCHEDULERS = {
    "slurm": {"SLURM_JOB_ID"},
    "pbs": {"PBS_NODEFILE"},
    "sge": {"PE_HOSTFILE"},
    "lsf": {"LSB_MCPU_HOSTS"},
}
EACH = pytest.mark.parametrize("key", ENGINES)


@EACH
def test_a_row_names_its_engine_and_the_variables_by_which_the_engine_is_recognised(key):
    engine, row = engine_of(key), ENGINES[key]
    assert engine.key == key and engine.title
    marks = {engine.ranks.rank} if engine.ranks else set()
    marks |= set(engine.hosts.markers) if engine.hosts else set()
    assert marks <= set(row.marks)
    assert set(row.marks) - marks == _OF_SCHEDULERS.get(key, set())
    assert bool(row.says) == bool(engine.mpirun)
    assert (key in BACKENDS) == (row.options is not None)


@EACH
def test_an_engine_is_imported_by_its_variables_alone(key):
    for name in ENGINES[key].marks:
        assert engine_of(key) in list(marked_engines({name: "0"}))
    assert list(marked_engines({"PATH": "/bin"})) == []


def test_a_child_of_a_rank_knows_another_mpirun_by_the_variable_of_its_rank():
    """The runtime imports no table of the launcher, so that these names stand there once more."""
    started = {engine.ranks.rank for engine in all_engines() if engine.ranks and engine.command}
    assert len(started) > 5 and started <= set(CLUSTER_VARIABLES)


def test_only_an_engine_with_a_command_that_ends_its_processes_has_a_name_for_them():
    step = {"SLURM_STEP_NODELIST": "h1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert launch_id({**step, "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}) == "12.3"
    assert launch_id({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == launch_id({}) == ""


LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "h1 2 h2 1 "}


@pytest.fixture
def ssh(tmp_path):
    """ssh(HOW, VARIABLES) → the hosts of the ranks."""
    (tmp_path / "ssh").symlink_to("/bin/true")

    def hosts(environ, **how):
        job = Job(program=("train.py",), backend="ssh", **how)
        return make_plan(job, {"PATH": str(tmp_path), **environ}, "ab" * 16).placement.hosts

    return hosts


def test_in_a_job_of_lsf_its_hosts_and_slots_are_used_unless_others_are_named(ssh):
    assert ssh(LSF) == ("h1", "h1", "h2")
    assert ssh(LSF, processes_per_host=1) == ("h1", "h2")
    assert ssh(LSF, host_list="h3:2") == ("h3", "h3")
    with pytest.raises(UsageError, match="--backend ssh needs the names of the hosts"):
        ssh({})


@pytest.mark.parametrize("text", ["h1", "h1 h2", "h1 0", "h1 2 h2", "h1 -1"])
def test_a_list_that_lsf_does_not_write_is_shown(ssh, text):
    with pytest.raises(UsageError, match=f"LSB_MCPU_HOSTS='{text}' is not a list of LSF's hosts, such as"):
        ssh(LSF | {"LSB_MCPU_HOSTS": text})
