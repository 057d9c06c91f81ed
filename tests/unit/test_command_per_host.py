"""One command per host: the plan of each, and what the options must agree on."""

import pytest

from jaxrun.cli.main import main
from jaxrun.cli.make_job import make_job, without_effect
from jaxrun.errors import UsageError
from jaxrun.spec.backends.by_hand import plan
from jaxrun.spec.job.devices import Gpus, Machine
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.render import plan_summary

ID = "0123456789abcdef" * 2
CPU = Machine("box", cores=(0, 1, 2, 3), gpus={"cuda": Gpus(), "rocm": Gpus()})
FOUR = Machine("box", (0, 1), {"cuda": Gpus(("NVIDIA H200",) * 4, "NVML"), "rocm": Gpus()}, cuda_plugin=True)


def plan_of(machine=CPU, **request):
    return plan(Job(program=("train.py",), backend="hosts", **request), {}, ID, machine)


@pytest.mark.parametrize(
    ("request_", "machine", "ranks", "size"),
    [
        ({"hosts": 2, "host_rank": 0, "processes": 8}, CPU, "0-3", 8),
        ({"hosts": 2, "host_rank": 1, "processes": 8}, CPU, "4-7", 8),
        ({"hosts": 3, "host_rank": 2, "processes_per_host": 2}, CPU, "4-5", 6),
        ({"hosts": 3, "host_rank": 2}, CPU, "2-2", 3),
        ({"hosts": 2, "host_rank": 1}, FOUR, "4-7", 8),
        ({"hosts": 2, "host_rank": 1, "devices_per_process": 4}, FOUR, "1-1", 2),
    ],
)
def test_each_host_starts_the_agent_of_its_own_ranks(request_, machine, ranks, size):
    made = plan_of(machine, **request_)
    assert made.launch_command.argv[-2:] == (ranks, str(size)) and len(made.workers) == size
    first, last = map(int, ranks.split("-"))
    own = [worker.rank for worker in made.workers if worker.host == f"--host-rank {request_['host_rank']}"]
    assert own == list(range(first, last + 1)) and made.agents[first] == tuple(own)
    assert sorted(rank for ranks in made.agents.values() for rank in ranks) == list(range(size))
    assert f"on {request_['hosts']} hosts, with a command on each" in plan_summary(made)


def test_the_options_become_a_job_of_this_backend():
    job = make_job({"program": ("p",), "hosts": 2, "host_rank": 0, "head": "h1:7777", "processes_per_node": 4}, {})
    assert (job.backend, job.host_rank, job.head, job.processes_per_host) == ("hosts", 0, "h1:7777", 4)
    values = {"program": ("p",), "hosts": 2, "host_rank": 0, "backend": "slurm", "partition": "gpu"}
    assert without_effect(values, {"backend", "partition"}) == {"backend", "partition"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host-rank", "1"], "--host-rank 1 needs --hosts: how many there are"),
        (["--host-rank", "2", "--hosts", "2"], "--host-rank 2 is none of --hosts 2, whose numbers are 0 to 1"),
        (["--head", "h1:7777"], "--head h1:7777 needs --host-rank"),
        (["--host-rank", "0", "--hosts", "2", "-n", "3"], "-n 3 processes cannot be dealt equally to --hosts 2"),
        (
            ["--host-rank", "0", "--hosts", "2", "-n", "4", "--processes-per-host", "1"],
            "-n 4 is not -N 2 x --processes-per-host 1",
        ),
        (["--host-rank", "0", "--hosts", "2", "--head", "h1"], "host:port or [fd00::1]:port, not 'h1'"),
        (["--host-rank", "0", "--hosts", "2", "--head", "nowhere.invalid:7"], "there is no host 'nowhere.invalid'"),
        (["--host-rank", "1", "--hosts", "2", "--rendezvous", "gone"], "--rendezvous gone is not a directory"),
        (["--host-rank", "0", "--hosts", "2", "--backend", "slurm"], "--host-rank is for hosts without --backend"),
        (["--host-rank", "0", "--hosts", "2", "-H", "h1"], "-H/--host is for --backend mpirun, not for --host-rank"),
        (["--hosts", "2"], "-N/--hosts is for --backend mpirun, --backend slurm or --host-rank on each"),
        (["--rendezvous", "."], "--rendezvous is for --host-rank on each host, not for --backend local"),
    ],
)
def test_what_does_not_fit_together_is_one_message(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "train.py").write_text("raise SystemExit('this program must not run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main([*words, "train.py"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_hosts_alone_mean_several_only_where_they_are():
    assert make_job({"program": ("p",), "hosts": 1, "processes_per_node": 3}, {}).processes == 3
    with pytest.raises(UsageError, match="--hosts"):
        make_job({"program": ("p",), "hosts": 2, "processes_per_node": 3}, {})
