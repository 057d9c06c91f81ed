"""The mpirun backend: placement, arguments, environment, which mpirun is used, the error if there is none."""

import itertools
import os
import re

import pytest

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.env import AgentEnv
from jaxrun.spec.backends import mpirun
from jaxrun.spec.backends.forwarded_variables import forwarded_variables
from jaxrun.spec.backends.mpi_hosts import HostSlots, place_on_hosts
from jaxrun.spec.backends.mpirun import plan
from jaxrun.spec.backends.slurm_allocation import Allocation
from jaxrun.spec.engines.mpich import MPICH
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV

_ID = "0123456789abcdef" * 2
_OPEN_MPI = "mpirun (Open MPI) 5.0.11"
_HYDRA = "HYDRA build details:\n    Version:    5.0.2"
_IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "2(x3)"}
_INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626"


def _job(**request):
    return Job(program=("train.py",), backend="mpirun", **request)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(TEXT) puts an mpirun on PATH whose --version prints TEXT; returns the environment to find it in."""
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "python"))

    def put(text, name="mpirun", status=0, words='cat "$0.output"'):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.with_name(f"{name}.output").write_text(text)
        program.write_text(f"#!/bin/sh\n{words}\nexit {status}\n")
        program.chmod(0o755)
        return {"PATH": f"{program.parent}:/usr/bin:/bin"}

    return put


def _planned(environ, **request):
    return plan(_job(**request), environ, _ID)


def _hosts(*slots):
    return tuple(HostSlots(f"h{number}", count) for number, count in enumerate(slots, start=1))


@pytest.mark.parametrize(
    ("hosts", "request_", "expected"),
    [
        (_hosts(4, 4), {"processes_per_host": 2}, "h1 h1 h2 h2"),
        (_hosts(None, None, None), {"hosts": 2, "processes_per_host": 2}, "h1 h1 h2 h2"),
        (_hosts(4, 4, 4), {"hosts": 2, "processes": 4}, "h1 h1 h2 h2"),
        (_hosts(1, 4, 4), {"hosts": 2, "processes": 4}, "h1 h2 h2 h2"),
        (_hosts(2, 1, 4), {"hosts": 2}, "h1 h1 h2"),
        (_hosts(2, 2), {"hosts": 2, "processes": 4, "processes_per_host": 2}, "h1 h1 h2 h2"),
        ((), {"processes": 2, "processes_per_host": 2}, "? ?"),
    ],
)
def test_every_rank_has_its_host(hosts, request_, expected):
    assert place_on_hosts(_job(**request_), hosts, None) == tuple(expected.split())


@pytest.mark.parametrize(
    ("hosts", "request_", "message"),
    [
        (_hosts(2, 2), {"processes": 5}, "-n 5, but 2 hosts have room for 4"),
        (_hosts(2, 2, 9), {"processes": 5, "hosts": 2}, "-n 5, but 2 hosts have room for 4"),
        (_hosts(2), {"hosts": 2}, "-N 2, but there is 1 host; lower -N"),
        ((), {}, "give the number with -n, or the hosts with -H h1:4,h2:4 or --hostfile"),
        ((), {"hosts": 2, "processes": 4}, "give them with -H or --hostfile"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(hosts, request_, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        place_on_hosts(_job(**request_), hosts, None)


@pytest.mark.parametrize(
    ("tasks", "request_", "expected"),
    [
        (None, {}, "n1 n2"),
        (5, {}, "n1 n1 n1 n2 n2"),
        (5, {"processes": 3}, "n1 n1 n2"),
        (None, {"processes_per_host": 2}, "n1 n1 n2 n2"),
        (None, {"hosts": 1, "processes": 3}, "n1 n1 n1"),
        (5, {"hosts": 1}, "n1 n1 n1"),
    ],
)
def test_in_a_job_of_slurm_its_nodes_are_the_hosts(tasks, request_, expected):
    inside = Allocation(job_id="7", nodes=("n1", "n2"), cpus=(8, 2), tasks=tasks)
    assert place_on_hosts(_job(**request_), (), inside) == tuple(expected.split())
    assert place_on_hosts(_job(processes=1), _hosts(1), inside) == ("h1",)


_LOCAL = "HOME USER LOGNAME SHELL PWD OLDPWD HOSTNAME TMPDIR DISPLAY SHLVL _ SSH_AUTH_SOCK XDG_RUNTIME_DIR DBUS_X"
_ENGINES = "SLURM_PROCID OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK PRTE_LAUNCHED HYDRA_X MPI_LOCALRANKID"
_STALE = "JAXRUN_RANK JAX_PROCESS_ID JAX_COORDINATOR_ADDRESS"


def test_variables_of_a_host_a_login_or_an_engine_stay_behind():
    names = [*_LOCAL.split(), *_ENGINES.split(), *_STALE.split(), "BASH_FUNC_x%%", "a b", "x*", "\udcff", "", "9"]
    environ = dict.fromkeys([*names, "PATH", "XLA_FLAGS", "TERM", "empty"], "")
    kept = {"PATH", "XLA_FLAGS", "TERM", "empty", *AgentEnv.variable_names()}
    assert forwarded_variables(environ, {}) == tuple(sorted(kept))
    given_by_the_user = {"HOME": "/data", "PATH": "/bin", "SLURM_X": "1"}
    assert forwarded_variables(environ, given_by_the_user) == tuple(sorted({*kept, *given_by_the_user}))


def test_the_plan_names_the_variables_and_never_their_values(install):
    environ = install(_OPEN_MPI) | {"XLA_FLAGS": "--of=somebody", "HOME": "/root"}
    made = _planned(environ, host_list="h1:2,h2:1", env={"HF_TOKEN": "hunter2"})
    argv = made.launch_command.argv
    assert (made.launch_command.engine, made.launch_command.title) == (OPEN_MPI, "Open MPI 5.0.11")
    assert argv[0] == f"{environ['PATH'].split(':')[0]}/mpirun" and argv[-len(AGENT_ARGV) :] == AGENT_ARGV
    exported = {name for option, name in itertools.pairwise(argv) if option == "-x"}
    assert {"HF_TOKEN", "XLA_FLAGS", "PATH", *AgentEnv.variable_names()} == exported
    assert not any(value in word for word in argv for value in ("hunter2", "--of=somebody"))
    assert [worker.host for worker in made.workers] == ["h1", "h1", "h2"]
    assert argv[argv.index("--wdir") + 1] == os.getcwd()


def test_agents_outlive_an_mpirun_where_the_job_can_go_on_without_a_host(install):
    environ = install(_OPEN_MPI)
    command = _planned(environ, host_list="h1:2,h2:2,h3:2", spares=1, max_restarts=1).launch_command
    assert (command.agent_hosts, command.size, command.agents_stay) == (("h1", "h1", "h2", "h2", "h3"), 4, True)
    assert _planned(environ, host_list="h1,h2", min_hosts=1, max_restarts=1).launch_command.agents_stay
    command = _planned(environ, host_list="h1:2,h2:2", max_restarts=1).launch_command
    assert (command.size, command.survive_host_loss, command.agents_stay) == (4, False, False)


def test_root_is_warned_and_outside_of_slurm_nothing_is_set(install, monkeypatch):
    environ = install(_OPEN_MPI)
    for uid, warned in ((0, True), (1000, False)):
        monkeypatch.setattr(mpirun.os, "geteuid", lambda uid=uid: uid)
        made = _planned(environ, processes=1)
        assert any("Open MPI 5.0.11 is run as root" in note for note in made.notes) is warned
        assert ("--allow-run-as-root" in made.launch_command.argv) is warned
        assert made.launch_command.set_env == {}


def test_where_the_user_maps_the_ranks_or_names_hosts_to_mpirun_their_hosts_are_unknown(install):
    made = _planned(install(_OPEN_MPI), host_list="h1:2,h2:2", mpi_args=("--map-by", "node"))
    assert [worker.host for worker in made.workers] == ["?"] * 4
    made = _planned(install(_HYDRA) | _IN_SLURM, processes=2, mpi_args=("-f", "hosts"))
    assert "-hosts" not in made.launch_command.argv and made.hosts == ("?",)


def test_a_hostfile_of_either_spelling_is_translated_for_the_family(install, tmp_path):
    (tmp_path / "hosts").write_text("h1 slots=2\nh2:1\n")
    made = _planned(install(_HYDRA), hostfile=tmp_path / "hosts")
    assert "-hosts h1:2,h2:1" in " ".join(made.launch_command.argv)
    assert (made.launch_command.engine, made.launch_command.set_env) == (MPICH, {})


@pytest.mark.parametrize(
    ("host_list", "launcher"), [("", "slurm"), ("n1:1,n3:1", "slurm"), ("n2,n1", "ssh"), ("n1,other", "ssh")]
)
def test_in_a_job_of_slurm_hydra_uses_srun_unless_that_would_put_hosts_elsewhere(install, host_list, launcher):
    made = _planned(install(_HYDRA) | _IN_SLURM, host_list=host_list)
    assert f"-launcher {launcher} " in " ".join(made.launch_command.argv)
    assert any("by ssh" in note for note in made.notes) is (launcher == "ssh")
    assert made.launch_command.set_env == {"SLURM_OVERLAP": "1"}


def test_intels_script_gives_way_to_the_program_beside_it_and_no_other_does(install, tmp_path):
    install(_INTEL, "mpiexec.hydra")
    assert _planned(install(_HYDRA), processes=1).launch_command.title == "MPICH 5.0.2"
    install(_HYDRA, words='export I_MPI_MPIRUN=mpirun; mpiexec.hydra "$@"')
    environ, home = install(_INTEL, "mpiexec.hydra"), str(tmp_path)
    made = _planned(environ, processes=1)
    assert made.launch_command.title == "Intel MPI 2021.18.1"
    assert made.launch_command.argv[0] == f"{home}/bin/mpiexec.hydra"
    path = f"{environ['PATH']}:{home}/bin"
    assert made.launch_command.set_env == {"I_MPI_PIN": "0", "I_MPI_ROOT": home, "PATH": path}
    made = _planned(environ | {"I_MPI_ROOT": "/elsewhere"}, processes=1, env={"I_MPI_PIN": "1"})
    assert made.launch_command.set_env == {}


def test_mpirun_is_found_on_path_beside_the_interpreter_or_by_its_own_path(install, tmp_path, monkeypatch):
    environ = install(_OPEN_MPI, "mpiexec.own")
    assert mpirun.find_mpirun("mpiexec.own", environ) == str(tmp_path / "bin" / "mpiexec.own")
    monkeypatch.chdir(tmp_path)
    assert mpirun.find_mpirun("./bin/mpiexec.own", {}) == str(tmp_path / "bin" / "mpiexec.own")
    install(_OPEN_MPI)
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "bin" / "python"))
    assert mpirun.find_mpirun("mpirun", {"PATH": "/nowhere"}) == str(tmp_path / "bin" / "mpirun")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("", "--backend mpirun needs mpirun, which is not on PATH (/nowhere); install one (apt-get install openmpi"),
        ("mpiexec.own", "--mpirun mpiexec.own is not on PATH (/nowhere)"),
        ("/nowhere/mpirun", "--mpirun /nowhere/mpirun is not an executable file"),
        ("/", "--mpirun / is not an executable file"),
    ],
)
def test_without_mpirun_it_says_what_to_install(install, asked, message):
    with pytest.raises(UnavailableError, match=re.escape(message)) as caught:
        _planned({"PATH": "/nowhere"}, processes=1, mpirun=asked)
    assert caught.value.exit_code == 69 and "--mpirun PATH" in str(caught.value)


@pytest.mark.parametrize(
    ("output", "status", "message"),
    [
        ("\n  frobnicate 1.0\nmore", 0, "says 'frobnicate 1.0' (exit code 0), which is neither Open MPI, MPICH nor"),
        ("", 3, "says 'nothing' (exit code 3)"),
        ("mpirun: error while loading shared libraries: libx.so.1: cannot open", 127, "says 'mpirun: error while load"),
    ],
)
def test_the_output_of_a_program_that_is_not_mpirun_is_quoted(install, output, status, message):
    with pytest.raises(UnavailableError, match=re.escape(message)):
        _planned(install(output, status=status, words='cat "$0.output" >&2'), processes=1)


def test_an_mpirun_that_does_not_answer_is_given_up(install, monkeypatch):
    monkeypatch.setattr(mpirun, "_VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match=r"--version has not answered in 0.2 s"):
        _planned(install("", words="exec sleep 20"), processes=1)


def test_an_mpirun_that_is_not_a_program_is_named(install, tmp_path):
    environ = install(_OPEN_MPI)
    (tmp_path / "bin" / "mpirun").write_bytes(b"\x7fELF nonsense")
    with pytest.raises(UnavailableError, match=r"bin/mpirun cannot be run: Exec format error"):
        _planned(environ, processes=1)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            ",".join(f"a-host-with-a-rather-long-name-{number}" for number in range(4000)),
            r"would have \d{6} bytes, more than 100000.*--mpi-args '--hostfile FILE'",
        ),
        ("[fd00::1]:2", r"mpirun takes no IPv6 address \(\[fd00::1\]\); give the host a name, or take --backend ssh"),
    ],
    ids=["too many", "IPv6"],
)
def test_hosts_that_cannot_be_said_to_mpirun_are_refused_with_a_way_out(install, hosts, message):
    with pytest.raises(UsageError, match=message):
        _planned(install(_OPEN_MPI), host_list=hosts)


def test_a_wrong_number_is_refused_before_any_mpirun_is_looked_for():
    with pytest.raises(UsageError):
        _planned({"PATH": "/nowhere"}, host_list="h1:1", processes=2)
