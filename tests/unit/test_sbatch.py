"""The batch script: its text, read as sbatch and bash read it, its file, and the environment for sbatch."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from jaxrun.errors import UsageError
from jaxrun.spec.backends import sbatch, submit
from jaxrun.spec.backends.batch_script import parse_time_limit
from jaxrun.spec.backends.generated_files import MARK
from jaxrun.spec.job.job import Job

HERE = "/home/me/my project"
WRITTEN = "#!/bin/bash\n# Written by jaxrun.\n#SBATCH --output=x.out\n#SBATCH --time=5\nexec true\n"


def make(program=("train.py",), directory=HERE, file="job.sh", **request):
    job = Job(program=program, backend="slurm", **request)
    return sbatch.sbatch_script(job, directory=directory, file=file)


def directives(text):
    """The options of the #SBATCH lines, which sbatch splits as a shell would."""
    return [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line[8:])]


def command(text):
    return shlex.split(text.splitlines()[-1])


def test_the_script_requests_what_the_job_requests():
    shape = {"hosts": 2, "processes": 8, "cpus_per_process": 4, "gpus_per_host": 4}
    slurm_args = ("--mem=64G", "--comment", "two words")
    text = make(**shape, partition="gpu", time_limit="2:00:00", account="me", slurm_args=slurm_args)
    assert shlex.join(directives(text)) == (
        "--job-name=train --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=4 --gpus-per-node=4 "
        "--partition=gpu --time=2:00:00 --account=me --mem=64G --comment 'two words' "
        f"'--chdir={HERE}' --output=jaxrun-%j.out --export=ALL --requeue --open-mode=append --signal=B:TERM@60"
    )


_TWO = ("--nodes=2", "--ntasks=2")


@pytest.mark.parametrize(
    ("request_", "shape"),
    [
        ({}, ["--ntasks=1"]),
        ({"hosts": 3}, ["--nodes=3", "--ntasks=3"]),
        ({"processes": 6}, ["--ntasks=6"]),
        ({"hosts": 4, "processes": 6}, ["--nodes=4", "--ntasks=6"]),
        ({"hosts": 2, "processes_per_host": 3}, ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3"]),
        ({"processes": 6, "processes_per_host": 3}, ["--nodes=2", "--ntasks=6", "--ntasks-per-node=3"]),
        ({"hosts": 2, "gpus_per_host": 8}, ["--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--gpus-per-node=8"]),
        (
            {"hosts": 2, "gpus_per_host": 8, "devices_per_process": 8},
            [*_TWO, "--ntasks-per-node=1", "--gpus-per-node=8"],
        ),
        ({"hosts": 2, "gpus_per_host": 8, "platform": "cpu"}, [*_TWO, "--gpus-per-node=8"]),
        # Spare nodes, the loss of one of which is no end of the job.
        (
            {"hosts": 8, "processes_per_host": 4, "spares": 2, "max_restarts": 3},
            ["--nodes=10", "--ntasks=40", "--ntasks-per-node=4", "--no-kill"],
        ),
    ],
)
def test_the_shape_follows_from_what_is_given(request_, shape):
    assert sbatch.sbatch_options(Job(program=("p",), backend="slurm", **request_)) == shape


def test_its_last_line_alone_is_a_command_the_same_one_in_place_of_the_shell():
    text = make(processes=4, tag="a 'b'", program=("my train.py", "--submit", "$HOME", "it's", ""))
    assert command(text) == ["exec", sys.executable, "-m", "jaxrun", "--processes=4", "--backend=slurm",
                             "--tag=a 'b'", "my train.py", "--submit", "$HOME", "it's", ""]  # fmt: skip
    lines = make(hosts=2, time_limit="1-0").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == lines[-1:]
    assert all(len(line) <= 120 for line in lines[:-1])


def test_options_of_the_script_are_not_repeated():
    replaced = {"submit": True, "sbatch": Path("x.sh"), "partition": "gpu", "time_limit": "10", "account": "me"}
    made = command(make(hosts=2, slurm_args=("--mem=1G", "--mpi=pmix", "-l"), **replaced))
    assert made[4:] == ["--hosts=2", "--backend=slurm", "--slurm-args=--mpi=pmix -l", "train.py"]


def test_a_secret_is_passed_on_by_its_name_unless_the_environment_may_not_reach_the_job():
    given = ("HF_TOKEN=hf_123", "DB=postgres://me:pw@h1/x", "DEBUG=1", "AWS_SECRET")
    program = ("train.py", "--env", "API_KEY=kept")
    text = make(assignments=given, env_files=(Path("more.env"),), program=program)
    expected = ["--env=HF_TOKEN", "--env=DB", "--env=DEBUG=1", "--env=AWS_SECRET", "--env-file=more.env"]
    assert command(text)[5:] == [*expected, *program]
    assert "hf_123" not in text and "pw" not in text and "# Set HF_TOKEN in that shell" in text
    secrets = sbatch.SLURM.find_secrets(Job(program=program, backend="slurm", assignments=given))
    assert secrets == {"HF_TOKEN": "hf_123", "DB": "postgres://me:pw@h1/x"}
    text = make(assignments=given, slurm_args=("--export=NONE",))
    assert "--env=HF_TOKEN=hf_123" in command(text) and "# Set" not in text


def test_options_for_srun_only_are_not_passed_to_sbatch():
    asked = make(slurm_args=("--mpi", "pmix", "--constraint", "a&b", "--wait=5", "-l", "--qos=x"))
    assert {"--constraint", "a&b", "--qos=x"} <= set(directives(asked))
    assert not {"--mpi", "pmix", "--wait=5", "-l"} & set(directives(asked))
    assert command(asked)[5] == "--slurm-args=--mpi pmix --wait=5 -l"


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (("-o", "x.out"), "--output"),
        (("--output=x.out",), "--output"),
        (("--no-requeue",), "--requeue"),
        (("--open-mode=truncate",), "--open-mode=append"),
        (("--signal=USR1",), "--signal=B:TERM"),
        (("--export=NONE",), "--export=ALL"),
    ],
)
def test_the_users_own_options_are_not_contradicted(words, gone):
    asked = [word for word in directives(make(slurm_args=words)) if word not in words]
    assert not any(word.startswith(gone) for word in asked)
    assert any(word.startswith(gone) for word in directives(make()))


def test_a_name_may_need_quotes():
    text = make(tag='it\'s a "run" # 3', file="my job.sh", program=("my 'train'.py",), hosts=2)
    assert directives(text)[0] == '--job-name=it\'s a "run" # 3'
    assert "sbatch 'my job.sh'" in text and text.startswith("#!/bin/bash\n" + MARK)
    assert directives(make(program=("/a/b/train.py",)))[0] == "--job-name=train"


@pytest.mark.parametrize("words", [{"file": "a\nb"}, {"directory": "a\nb"}, {"program": ("p", "a\nb")}])
def test_a_word_that_a_line_cannot_hold_is_refused(words):
    with pytest.raises(UsageError, match="line by line"):
        make(**words)


@pytest.mark.parametrize(
    ("request_", "notice"),
    [
        ({}, "60"),
        ({"time_limit": "1:00:00"}, "60"),
        ({"time_limit": "1:00:00", "grace": 100.0}, "130"),
        ({"time_limit": "7"}, None),
        ({"time_limit": "8"}, "60"),
        ({"time_limit": "what?"}, "60"),
    ],
)
def test_there_is_notice_of_the_end_unless_the_job_is_too_short_for_it(request_, notice):
    found = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", make(**request_), re.MULTILINE)
    assert found == ([notice] if notice else [])


def test_a_job_that_goes_on_is_warned_by_sigusr2_early_enough_to_be_started_again():
    text = make(requeue=True, time_limit="4:00:00", grace=100.0)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR2@115"} <= set(directives(text))
    assert command(text)[-5:] == ["jaxrun", "--backend=slurm", "--requeue", "--grace=100", "train.py"]
    with pytest.raises(UsageError, match="--time 1 is too short for --requeue"):
        make(requeue=True, time_limit="1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90:30", 5430), ("1:30:00", 5400), ("1-12:30", 131400), ("1-12:30:15", 131415), ("UNLIMITED", None), ("", None)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text, expected):
    assert parse_time_limit(text) == expected


def test_neither_variables_nor_the_allocation_of_this_shell_override_what_the_script_says():
    theirs = {"SBATCH_OUTPUT": "y", "SBATCH_TIMELIMIT": "9", "SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "1-9"}
    inside = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS": "9", "SLURM_TRES_PER_TASK": "cpu=8"}
    ours = {"SBATCH_ACCOUNT": "me", "SLURM_CONF": "/c", "SLURM_CLUSTERS": "a", "SLURMX": "1"}
    assert sbatch.submission_env(WRITTEN, {**theirs, **inside, **ours}) == ours
    outside = {**ours, "SLURM_MPI_TYPE": "pmix"}
    assert sbatch.submission_env(WRITTEN, {**theirs, **outside}) == outside


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_script_can_be_run_and_written_again_and_only_its_owner_can_read_it(tmp_path, umask):
    path = tmp_path / "job.sh"
    path.write_text(WRITTEN + "1")
    path.chmod(0o755)
    before = os.umask(umask)
    try:
        submit.write_script(sbatch.SLURM, path, WRITTEN)
    finally:
        os.umask(before)
    assert path.read_text() == WRITTEN and path.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.sh"]


def test_where_a_foreign_file_is_or_nothing_can_be_written_it_says_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("precious")
    with pytest.raises(UsageError, match=r"train\.py exists, and is not a batch script"):
        submit.write_script(sbatch.SLURM, path, WRITTEN)
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match=r"cannot be written to .*nowhere/job\.sh: No such file or directory"):
        submit.write_script(sbatch.SLURM, tmp_path / "nowhere" / "job.sh", WRITTEN)
