"""Batch scripts for qsub, of PBS and of Grid Engine; what both print of a job; and who starts the agents in one."""

import os
import shlex
import sys

import pytest

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.spec.backends import grid_engine_job, pbs_job
from jaxrun.spec.backends.batch_script import BatchPhase, BatchState
from jaxrun.spec.backends.planning import make_plan
from jaxrun.spec.engines.lookup import engine_of, scheduler_of
from jaxrun.spec.job.combinations import check_options
from jaxrun.spec.job.job import Job

HERE = "/home/me/two words"


def make(backend, **request):
    request.setdefault("processes", 8)
    if backend == "sge":
        request.setdefault("parallel_environment", "mpi")
    job = Job(program=("train.py", "--lr", "0.1"), backend=backend, qsub=None, submit=True, **request)
    check_options(job)
    return scheduler_of(backend).write(job, HERE, "job.sh")


def directives(text, prefix):
    """The options, as qsub splits them."""
    return [shlex.split(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix)]


def test_pbs_gets_a_chunk_for_each_host_with_its_processes_cores_and_gpus():
    shape = {"hosts": 2, "processes_per_host": 4, "gpus_per_host": 4, "cpus_per_process": 8}
    text = make("pbs", **shape, time_limit="90", queue="prod", account="me", qsub_args=("-l", "filesystems=home"))
    assert directives(text, "#PBS ") == [
        ["-N", "train"],
        ["-l", "select=2:ncpus=32:mpiprocs=4:ngpus=4"],
        ["-l", "place=scatter"],
        ["-l", "walltime=1:30:00"],
        ["-q", "prod"],
        ["-A", "me"],
        ["-j", "oe"],
        ["-V"],
        ["-r", "n"],
        ["-l", "filesystems=home"],
    ]
    options = ["--processes=8", "--hosts=2", "--processes-per-host=4", "--backend=pbs", "--cpus-per-process=8"]
    words = [sys.executable, "-m", "jaxrun", *options, "--gpus-per-host=4", "train.py", "--lr", "0.1"]
    assert shlex.split(text.splitlines()[-1]) == ["exec", *words]
    assert f"cd '{HERE}' || exit\n" in text
    assert f"\nexec >>'{HERE}/jaxrun-'${{PBS_JOBID%%.*}}.out 2>&1\n" in text
    assert scheduler_of("pbs").output(text, "12.server") == f"{HERE}/jaxrun-12.out"


@pytest.mark.parametrize(
    ("request_", "chunks"),
    [
        ({"processes": 6}, ["-l select=6:ncpus=1:mpiprocs=1"]),
        ({"processes": 6, "processes_per_host": 3}, ["-l select=2:ncpus=3:mpiprocs=3", "-l place=scatter"]),
        ({"hosts": 2, "processes": None}, ["-l select=2:ncpus=1:mpiprocs=1", "-l place=scatter"]),
        ({"qsub_args": ("-l", "ncpus=96,ngpus=8,mem=100GB")}, ["-l ncpus=96,ngpus=8,mem=100GB"]),
        ({"qsub_args": ("-lselect=2:system=polaris",)}, ["-lselect=2:system=polaris"]),
    ],
)
def test_chunks_follow_from_the_shape_unless_the_user_chooses_them(request_, chunks):
    found = [shlex.join(words) for words in directives(make("pbs", **request_), "#PBS ")]
    assert [words for words in found if words.startswith("-l")] == chunks


def test_grid_engine_gets_a_slot_for_each_core_of_a_process():
    request = {"time_limit": "1-0:00:30", "queue": "gpu.q", "account": "physics", "cpus_per_process": 4}
    text = make("sge", **request, qsub_args=("-l", "gpu=1", "-m", "e"), tag="9 lives")
    assert directives(text, "#$ ") == [
        ["-N", "j9_lives"],
        ["-S", "/bin/bash"],
        ["-pe", "mpi", "32"],
        ["-l", "h_rt=24:00:30"],
        ["-q", "gpu.q"],
        ["-P", "physics"],
        ["-wd", HERE],
        ["-o", "jaxrun-$JOB_ID.out"],
        ["-j", "y"],
        ["-V"],
        ["-r", "n"],
        ["-l", "gpu=1"],
        ["-m", "e"],
    ]
    assert shlex.split(text.splitlines()[-1])[:5] == ["exec", sys.executable, "-m", "jaxrun", "--processes=8"]
    assert scheduler_of("sge").output(text, "7") == f"{HERE}/jaxrun-7.out"
    assert scheduler_of("sge").output(make("sge", qsub_args=("-o", "/out/$JOB_NAME")), "7") == ""


@pytest.mark.parametrize("backend", ["pbs", "sge"])
def test_a_job_that_goes_on_may_be_started_again_and_stops_before_the_limit(backend):
    text = make(backend, requeue=True, time_limit="2:00:00")
    assert "-r y" in text and "# 40 s before the limit, the program is asked to stop" in text
    assert "--requeue" in shlex.split(text.splitlines()[-1])
    with pytest.raises(UsageError, match="--time 0:40 is too short for --requeue: the job would be stopped 40 s"):
        make(backend, requeue=True, time_limit="0:40")
    assert "# 15 s before" in make(backend, requeue=True, time_limit="0:40", save_time=5.0)
    with pytest.raises(UsageError, match="--time soon is not a time limit such as"):
        make(backend, time_limit="soon")


@pytest.mark.parametrize("backend", ["pbs", "sge"])
def test_a_secret_is_passed_on_by_its_name(backend):
    text = make(backend, assignments=("API_TOKEN=abc", "MODE=fast"))
    assert "abc" not in text and "--env=API_TOKEN --env=MODE=fast" in text and "# Set API_TOKEN in that shell" in text


@pytest.mark.parametrize(
    ("backend", "words", "option"),
    [("sge", ("-pe", "mpi", "4"), "--pe"), ("sge", ("-q", "a"), "--queue"), ("pbs", ("-A", "me"), "--account")],
)
def test_what_jaxrun_must_know_itself_is_no_argument_for_qsub(backend, words, option):
    with pytest.raises(UsageError, match=f"--qsub-args {words[0]}: jaxrun needs to know this, too; use {option}"):
        make(backend, qsub_args=words)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"--submit and --qsub need the parallel environment of the job: --pe NAME"):
        make("sge", parallel_environment="")
    with pytest.raises(UsageError, match="--pe is for --backend sge, not for --backend pbs"):
        make("pbs", parallel_environment="mpi")
    with pytest.raises(UsageError, match=r"--gpus-per-host is for .*--backend pbs.* not for --backend sge"):
        make("sge", gpus_per_host=4)


# ---- what a scheduler prints of a job

# As Grid Engine 8.1.9 printed them.
QUEUE = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>
    <job_list state="{kind}">
      <JB_job_number>10</JB_job_number>
      <JAT_prio>0.50000</JAT_prio>
      <JB_name>train</JB_name>
      <JB_owner>me</JB_owner>
      <state>{state}</state>
      <JAT_start_time>2026-11-29T18:27:10</JAT_start_time>
      <queue_name>{queue}</queue_name>
      <slots>3</slots>
    </job_list>
  </queue_info>
</job_info>
"""
ACCOUNTING = """==============================================================
qname        all.q
hostname     h2
jobnumber    10
failed       {failed}
exit_status  {status}
ru_wallclock 4s
"""


@pytest.mark.parametrize(
    ("kind", "state", "phase", "restarts"),
    [
        ("pending", "qw", BatchPhase.PENDING, 0),
        ("pending", "Eqw", BatchPhase.PENDING, 0),
        ("pending", "Rq", BatchPhase.PENDING, 1),
        ("running", "t", BatchPhase.RUNNING, 0),
        ("running", "r", BatchPhase.RUNNING, 0),
        ("running", "Rr", BatchPhase.RUNNING, 1),
        ("running", "dr", BatchPhase.BETWEEN, 0),
    ],
)
def test_a_job_of_grid_engine_is_read_from_its_queue(kind, state, phase, restarts):
    found = grid_engine_job.parse_queue(QUEUE.format(kind=kind, state=state, queue="all.q@h2"), "10")
    assert (found.phase, found.nodes, found.restarts, found.is_over) == (phase, "all.q@h2", restarts, False)
    assert ("qstat -j 10 says why" in found.reason) == (state == "Eqw")
    assert grid_engine_job.parse_queue(QUEUE.format(kind=kind, state=state, queue=""), "1") is None
    assert grid_engine_job.parse_queue("error: commlib error", "10") is None


@pytest.mark.parametrize(
    ("failed", "status", "exit_status", "name"),
    [
        ("0    ", "0", 0, "failed (0)"),
        ("0    ", "7", 7, "failed (0)"),
        ("100 : assumedly after job", "137                  (Killed)", 137, "failed (assumedly after job)"),
        ("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", "137", 124, None),
        ("26  : opening input/output file", "0", 137, "failed (opening input/output file)"),
    ],
)
def test_the_last_record_of_the_accounting_says_how_a_job_has_ended(failed, status, exit_status, name):
    again = ACCOUNTING.format(failed="25  : rescheduling", status="99")
    found = grid_engine_job.parse_accounting(again + ACCOUNTING.format(failed=failed, status=status))
    assert (found.is_over, found.exit_status, found.is_plain) == (True, exit_status, failed.startswith("0 "))
    assert name is None or found.name == name
    assert grid_engine_job.parse_accounting("error: job id 10 not found") is None


# As the reference of OpenPBS shows it; a tab continues a line.
SHOWN = """Job Id: 12.server
    Job_Name = train
    job_state = {state}
    exec_host = node1/0*32+node2/
\t1*32
    comment = {comment}
    Resource_List.walltime = 01:00:00
    stime = Sun Nov 29 18:00:00 2026
    run_count = {runs}
{more}
"""


@pytest.mark.parametrize(
    ("state", "more", "expected"),
    [
        ("Q", "", {"phase": BatchPhase.PENDING, "exit_status": 0}),
        ("H", "", {"phase": BatchPhase.PENDING, "exit_status": 0}),
        ("R", "", {"phase": BatchPhase.RUNNING, "exit_status": 0}),
        ("E", "", {"phase": BatchPhase.BETWEEN, "exit_status": 0}),
        ("F", "    Exit_status = 0", {"phase": BatchPhase.OVER, "exit_status": 0}),
        ("F", "    Exit_status = 7", {"phase": BatchPhase.OVER, "exit_status": 7}),
        ("F", "    Exit_status = 271", {"phase": BatchPhase.OVER, "exit_status": 143, "is_plain": False}),
        ("F", "    Exit_status = -3", {"phase": BatchPhase.OVER, "exit_status": 69, "is_plain": False}),
    ],
)
def test_a_job_of_pbs_is_read_as_its_manual_shows_it(state, more, expected):
    found = pbs_job.parse_job(SHOWN.format(state=state, comment="Not Running: no nodes", runs=3, more=more))
    rest = {"name": f"{state} (Not Running: no nodes)", "reason": "Not Running: no nodes", "restarts": 2}
    assert found == BatchState(nodes="node1+node2", **rest, **expected)
    assert pbs_job.parse_job("qstat: Unknown Job Id 12.server") is None


# ---- agents within a job


@pytest.fixture
def within(tmp_path, monkeypatch):
    """within(BACKEND, PROGRAMS, LINES, …) → the plan in a job whose scheduler has written these lines."""

    monkeypatch.setattr(grid_engine_job, "run_command", lambda *words: None)  # qconf -sp, which is on no PATH here

    def make(backend, programs, lines, **request):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name in programs:
            (folder / name).symlink_to("/bin/true")
        path = tmp_path / "hosts"
        path.write_text("".join(f"{line}\n" for line in lines))
        of_pbs = {"PBS_NODEFILE": str(path), "PBS_JOBID": "12.server"}
        of_grid_engine = {"PE_HOSTFILE": str(path), "JOB_ID": "7", "PE": "mpi"}
        environ = {"PATH": str(folder), **(of_pbs if backend == "pbs" else of_grid_engine)}
        return make_plan(Job(program=("train.py",), backend=backend, **request), environ, "ab" * 16)

    return make


SLOTS = ("h1 2 all.q@h1 UNDEFINED", "h2 1 all.q@h2 <NULL>", "h1 1 gpu.q@h1 UNDEFINED")


def test_slots_of_grid_engine_are_ranks_and_qrsh_starts_their_agents(within):
    plan = within("sge", ["qrsh", "ssh"], SLOTS)
    assert plan.placement.hosts == ("h1", "h1", "h1", "h2")
    command = plan.launch_command
    words = command.argv[: command.argv.index("--")]
    assert words[2:7] == ("jaxrun.node.ssh", "--qrsh", words[4], "--here", "h1") and words[-2:] == ("h1=0-2", "h2=3-3")
    assert command.title == "qrsh in Grid Engine's job 7" and command.engine.key == "sge"
    assert not command.survive_host_loss
    assert within("sge", [], SLOTS, processes=2, hosts=2).placement.hosts == ("h1", "h2")
    assert within("sge", [], SLOTS, cpus_per_process=2).placement.hosts == ("h1",)
    with pytest.raises(UsageError, match="--cpus-per-process 9, but no host of the job has so many slots: h1:2,h2:1"):
        within("sge", [], SLOTS, cpus_per_process=9)


def test_without_qrsh_or_outside_of_its_jobs_ssh_is_used_and_it_says_why(within):
    assert within("sge", ["ssh"], SLOTS).launch_command.title == "ssh (qrsh is not on PATH)"


def test_outside_of_a_job_it_says_what_to_type():
    with pytest.raises(UsageError, match=r"PE_HOSTFILE is not set\. Add --submit --pe NAME before the program"):
        make_plan(Job(program=("p",), backend="sge", processes=2), {}, "ab" * 16)
    with pytest.raises(UsageError, match="job 7 was submitted without one: qsub -pe NAME SLOTS"):
        environ = {"JOB_ID": "7", "SGE_JOB_SPOOL_DIR": "/spool"}
        make_plan(Job(program=("p",), backend="sge", processes=2), environ, "ab" * 16)
    with pytest.raises(UsageError, match="begin with: qsub -I -l select=2:ncpus=4:mpiprocs=4:ngpus=4 -l place=scatter"):
        make_plan(Job(program=("p",), backend="pbs", hosts=2, gpus_per_host=4), {}, "ab" * 16)


@pytest.mark.parametrize("lines", [["h1"], ["h1 x q UNDEFINED"], ["h1 0 q UNDEFINED"], []])
def test_a_file_that_grid_engine_does_not_write_is_shown(within, lines):
    with pytest.raises(UsageError, match=r"PE_HOSTFILE=.* has \[.*not lines such as 'h1 4 all.q@h1 UNDEFINED'"):
        within("sge", ["qrsh"], lines)


def test_a_file_on_another_host_cannot_be_read():
    with pytest.raises(UsageError, match=r"PE_HOSTFILE=/nowhere/hosts cannot be read \(No such file or directory\)"):
        engine_of("sge").slots({"PE_HOSTFILE": "/nowhere/hosts"})


def test_slots_of_pbs_are_lines_and_single_ones_do_not_limit_a_host(within):
    assert within("pbs", ["ssh"], ["n1", "n1", "n2"]).placement.hosts == ("n1", "n1", "n2")
    assert within("pbs", [], ["n1", "n2"], processes=8).placement.hosts == ("n1",) * 4 + ("n2",) * 4


def test_the_first_of_mpiexec_mpirun_pbsdsh_and_ssh_that_is_there_starts_agents_in_pbs(within, tmp_path):
    lines = ["n1", "n1", "n2"]
    with pytest.raises(UnavailableError, match="--backend pbs needs mpiexec, mpirun, pbsdsh or ssh, and none is on"):
        within("pbs", [], lines)
    assert within("pbs", ["ssh"], lines).launch_command.title == "ssh (neither mpirun nor pbsdsh is on PATH)"
    command = within("pbs", ["pbsdsh"], lines).launch_command
    at = command.argv.index("--")
    assert command.title == "pbsdsh" and command.argv[at - 3 : at] == ("3", "0=0-1", "2=2-2")
    assert command.agents == {0: (0, 1), 2: (2,)}
    pals = tmp_path / "pals" / "bin" / "mpiexec"
    pals.parent.mkdir(parents=True)
    pals.write_text("#!/bin/sh\n")
    pals.chmod(0o755)
    os.symlink(pals, tmp_path / "bin" / "mpiexec")
    command = within("pbs", [], lines).launch_command
    assert command.engine.key == "pals" and command.argv[command.argv.index("--hosts") + 1] == "n1,n1,n2"


def test_a_job_that_is_started_again_is_known_by_its_number(within):
    assert within("sge", ["qrsh"], SLOTS, requeue=True).requeue_id.endswith(" 7")
    assert within("pbs", ["ssh"], ["n1"], requeue=True).requeue_id == "pbs 12.server"
    assert within("pbs", [], ["n1"], requeue=True).job.save_time == 30.0
    assert within("pbs", [], ["n1"]).requeue_id == ""
