"""What planning asks of the programs of engines, with programs that stand in for them."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from test_hosts import NODE_LISTS

from jaxrun.cli.main import main
from jaxrun.errors import UsageError
from jaxrun.spec.backends import sbatch
from jaxrun.spec.backends.planning import make_plan
from jaxrun.spec.backends.slurm_job import end_of_allocation
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.rank_placement import describe_left_out

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[1-3]", "SLURM_JOB_CPUS_PER_NODE": "2(x3)", "SLURM_NTASKS": "6"}


@pytest.fixture
def programs(tmp_path):
    """A PATH with an mpirun and an srun."""
    for name in ("mpirun", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("backend", "wanted", "environ"),
    [
        ("mpirun", {"host_list": "h1:2,h2:2,h3:2"}, {}),
        ("mpirun", {}, SLURM),
        ("slurm", {}, SLURM),
        ("slurm", {"spares": 1, "host_check": "true"}, {**SLURM, "SLURM_JOB_NODELIST": "h[1-3]"}),
    ],
    ids=["-H", "mpirun in Slurm", "Slurm", "a spare host"],
)
def test_no_rank_is_on_an_excluded_host_and_the_plan_says_why(programs, backend, wanted, environ):
    environ = {**environ, "PATH": programs}
    wanted = {"program": ("train.py",), "backend": backend, "exclude_hosts": "h2,h9", **wanted}
    made = make_plan(Job(**wanted), environ, "ab" * 16)
    assert [worker.host for worker in made.workers] == ["h1", "h1", "h3", "h3"]
    assert describe_left_out(made.placement.left_out, None) == "without h2 (--exclude-hosts)"
    assert not any("h2" in word for word in made.launch_command.argv)


@pytest.mark.parametrize("wanted", [{"exclude_hosts": "h3"}, {"quarantine": "bad"}], ids=str)
def test_hosts_that_only_mpirun_knows_cannot_be_excluded(programs, tmp_path, wanted):
    wanted = {name: tmp_path / value if name == "quarantine" else value for name, value in wanted.items()}
    with pytest.raises(UsageError, match="needs the names of the hosts"):
        make_plan(Job(program=("train.py",), backend="mpirun", processes=2, **wanted), {"PATH": programs}, "ab" * 16)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's scontrol is not installed")
def test_nodes_are_read_from_scontrol(tmp_path):
    settings_file = tmp_path / "slurm.conf"
    settings_file.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=none\n")
    known = [text for text in NODE_LISTS if "]." not in text]
    command = ["scontrol", "show", "hostnames", ",".join(known)]
    environ = {**os.environ, "SLURM_CONF": str(settings_file)}
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert shown.stderr == "" and shown.stdout.split() == " ".join(map(NODE_LISTS.get, known)).split()


def test_bash_can_read_a_batch_script_whose_names_need_quotes():
    job = Job(program=("my 'train'.py",), backend="slurm", hosts=2, tag='it\'s a "run" # 3')
    text = sbatch.sbatch_script(job, directory="/home/me/my project", file="my job.sh")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("said", "end"), [("5:00", 1300), ("UNLIMITED", None), ("NOT_SET", None), ("", None)])
def test_when_slurm_ends_a_job_it_says_itself(tmp_path, said, end):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "--noheader --jobs=7 --format=%L" ] && echo {said}\n')
    squeue.chmod(0o755)
    environ = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert end_of_allocation(environ, 1000) == end
    assert end_of_allocation({**environ, "SLURM_JOB_END_TIME": "1234"}, 1000) == 1234
    assert end_of_allocation({"PATH": environ["PATH"]}, 1000) is None
    assert end_of_allocation({"SLURM_JOB_ID": "7", "PATH": ""}, 1000) is None


def test_submit_hands_the_manifest_to_kubectl_and_says_how_to_watch_the_job(monkeypatch, capsys, tmp_path):
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        '#!/bin/sh\necho "$@" >> ../calls\nif grep -q refuse "$3"; then echo "no quota" >&2; exit 1; fi\n'
    )
    kubectl.chmod(0o755)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{kubectl.parent}:/usr/bin:/bin")
    words = ["--backend", "kubernetes", "--image", "i", "--namespace", "ml", "--submit"]
    assert main([*words, "train.py"]) == 0
    (written,) = (tmp_path / "work").iterdir()
    assert (tmp_path / "calls").read_text() == f"apply -f {written.name}\n"
    said = capsys.readouterr().err
    name = written.name.removesuffix(".yaml")
    assert f"submitted {name} (manifest: {written.name})" in said
    assert (
        f"kubectl logs -n ml -f -l app.kubernetes.io/instance={name},batch.kubernetes.io/job-completion-index=0" in said
    )
    assert main([*words, "refuse.py"]) == 69
    assert "kubectl refused the job: no quota\nthe manifest is kept" in capsys.readouterr().err


def test_without_kubectl_nothing_is_submitted(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--backend", "kubernetes", "--image", "i", "--submit", "train.py"]) == 69
    assert "--submit needs kubectl" in capsys.readouterr().err
