"""torchrun's own options: what each one becomes, and what is said of those that mean nothing here."""

from pathlib import Path

import pytest

from jaxrun.cli.main import main
from jaxrun.cli.torchrun import translate
from jaxrun.errors import UsageError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hosts": "1:2"}, {"hosts": 2, "min_hosts": 1}),
        ({"hosts": "2:2"}, {"hosts": 2}),
        ({"hosts": "auto"}, {"hosts": "auto"}),
        ({"torchrun_log_dir": "logs"}, {"run_dir": Path("logs")}),
        ({"torchrun_local_ranks_filter": "0,1"}, {"only_ranks": (range(1), range(1, 2))}),
        ({"torchrun_module": True}, {"module": True}),
        (
            {"torchrun_no_python": True, "program": ("/usr/bin/python3.11", "-u", "t.py", "-u")},
            {"program": ("t.py", "-u")},
        ),
        ({"torchrun_no_python": True, "program": ("./t.py", "-u")}, {"program": ("./t.py", "-u")}),
        ({"hosts": 2, "host_rank": 1, "torchrun_rdzv_endpoint": "h1:1"}, {"hosts": 2, "host_rank": 1, "head": "h1:1"}),
        ({"hosts": 2, "host_rank": 1, "torchrun_master_addr": "h1"}, {"hosts": 2, "host_rank": 1, "head": "h1:29500"}),
        (
            {"hosts": 2, "host_rank": 0, "torchrun_master_addr": "h1", "torchrun_master_port": "7"},
            {"hosts": 2, "host_rank": 0, "head": "h1:7"},
        ),
    ],
    ids=str,
)
def test_what_an_option_becomes(values, expected):
    assert translate(values, {}) == (expected, "")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"torchrun_standalone": True}, ["--standalone"]),
        ({"torchrun_rdzv_backend": "c10d", "torchrun_rdzv_id": "7"}, ["--rdzv-backend, --rdzv-id"]),
        ({"torchrun_redirects": "3", "torchrun_tee": "3"}, ["--redirects, --tee"]),
        ({"torchrun_tee": "0:3,1:1"}, ["--tee"]),
        ({"torchrun_monitor_interval": "5"}, ["--monitor-interval"]),
        ({"torchrun_run_path": True, "torchrun_virtual_local_rank": True}, ["--virtual-local-rank", "--run-path"]),
        ({"torchrun_rdzv_endpoint": "localhost:0", "hosts": 1}, ["--rdzv-endpoint"]),
        ({"torchrun_rdzv_endpoint": "h1:7", "hosts": 2, "backend": "slurm"}, ["--rdzv-endpoint"]),
        ({"torchrun_local_ranks_filter": "0", "hosts": 2}, ["--local-ranks-filter", "--only-rank"]),
    ],
    ids=str,
)
def test_what_means_nothing_here_is_left_out_and_one_line_says_so(values, named):
    own, line = translate(values, {})
    assert own == {name: value for name, value in values.items() if not name.startswith("torchrun_")}
    assert line.startswith("of torchrun's options these have no effect here: ") and "\n" not in line
    assert all(word in line for word in named)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hosts": 2, "torchrun_rdzv_endpoint": "h1"}, r"which of the 2.*--host-rank.*--head h1:29400"),
        ({"hosts": "3:2"}, "MIN:MAX is expected"),
        ({"hosts": "0:2"}, "MIN:MAX is expected"),
        ({"hosts": "1:2", "min_hosts": 2}, "say the same"),
        ({"torchrun_log_dir": "a", "run_dir": "b"}, "--log-dir and --run-dir say the same"),
        ({"torchrun_no_python": True, "program": ("./run.sh",)}, "--wrap"),
        ({"torchrun_no_python": True, "program": ("python", "-m", "x")}, "jaxrun -m MODULE"),
        ({"torchrun_no_python": True, "program": ()}, "--wrap"),
        ({"torchrun_tee": "10"}, "-t/--tee 10: .*Slurm's -t is --time"),
        ({"torchrun_redirects": "x"}, "-r/--redirects x: torchrun takes 0 to 3"),
    ],
    ids=str,
)
def test_what_says_too_little_or_too_much_is_refused(values, text):
    with pytest.raises(UsageError, match=text):
        translate(values, {})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--num_processes 4", "use -n/--processes"),
        ("--machine_rank 0", "use --host-rank"),
        ("--mixed_precision bf16", "the program decides that"),
        ("--num_gpus=2", "use -n/--processes"),
        ("--include h1:0,1", "use -H/--host h1:4,h2:4"),
        ("-x FOO=1", "use --env FOO=1"),
        ("-x WANDB_TOKEN=abc", "use --env WANDB_TOKEN=***"),
        ("-genv FOO 1", "use --env FOO=1"),
        ("-env FOO 1", "use --env FOO=1"),
        ("-machinefile h", "use --hostfile"),  # click reads -m -a …
        ("-mca btl tcp", "pass options to mpirun"),
        ("-npernode 2", "use --processes-per-host"),  # … -n with the value "pernode"
        ("-hostfile h", "use --hostfile"),  # … and -h, the help
        ("-host h1", "use -H/--host h1:4,h2:4"),
        ("-qn 2", "use --quiet"),
        ("--fsdp_offload_params true", "leave it out: JAX shards"),
        ("--gres=gpu:4", "use --gpus-per-host"),
    ],
)
def test_options_of_accelerate_deepspeed_srun_and_mpirun_get_a_hint(words, text, capsys):
    assert main([*words.split(), "train.py"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("jaxrun: there is no option -") and f": {text}" in shown


@pytest.mark.parametrize(("hosts", "host_rank"), [(2, 1), (3, None)])
def test_one_task_of_srun_on_each_host_knows_its_number_as_with_torchrun(hosts, host_rank):
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    environ |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "h[1-2]"}
    values = {"hosts": hosts, "torchrun_rdzv_endpoint": "h1:29500", "torchrun_rdzv_backend": "c10d"}
    if host_rank is None:  # several tasks on a host, or a step on other hosts, tell nothing
        with pytest.raises(UsageError, match="which of the 3 this is"):
            translate(values, environ)
    else:
        own, _ = translate(values, environ)
        assert own == {"hosts": hosts, "host_rank": host_rank, "head": "h1:29500"}


def test_a_line_as_copied_from_the_web_is_understood_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = "--standalone --nproc_per_node=2 --nnodes 1 --rdzv-backend c10d --rdzv_endpoint localhost:0 --rdzv-id 7"
    more = "--redirects 3 -t 3 --log-dir logs --monitor-interval 1 --local-ranks-filter 0 --max-restarts=0 --dry-run"
    assert main([*words.split(), *more.split(), "train.py", "--lr", "1"]) == 0
    shown = capsys.readouterr()
    assert "2 processes" in shown.out and shown.err.count("\n") == 1 and "--tee" in shown.err
