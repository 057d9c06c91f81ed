"""The specification of a gang, the line after %gang that makes one, and the command line that it becomes."""

import inspect
from pathlib import Path

import pytest

import jaxrun
from jaxrun.cli.click_options import parameters
from jaxrun.cli.make_job import make_job
from jaxrun.errors import UsageError
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.frontends.notebook.arguments import MagicArguments, parse_arguments

RUN_DIR = Path("/somewhere/run dir")


def job(spec):
    """The job that the command line of a spec describes."""
    import click

    command = click.Command("jaxrun", params=parameters(), context_settings={"allow_interspersed_args": False})
    values = command.make_context("jaxrun", list(spec.command_line(RUN_DIR))).params
    values.pop("dry_run")
    return make_job(values, {})


FULL = GangSpec(processes=4, devices=2, hosts=2, platform="cpu", lockstep="strict", env={"A": "1=2", "B": ""})
OPTIONS = ("--partition", "debug", "--grace=7", "--tag", "a b")
JOBS = {
    "all is left to the command": (
        GangSpec(),
        {"processes": None, "devices_per_process": None, "simulated_hosts": 0, "platform": "auto", "run_dir": RUN_DIR},
    ),
    "all is given": (
        FULL,
        {"processes": 4, "devices_per_process": 2, "simulated_hosts": 2, "platform": "cpu", "lockstep": "strict"},
    ),
    "a gang may wait for days": (FULL, {"env": {"A": "1=2", "B": ""}, "stall_timeout": 0}),
    "hosts of a cluster": (GangSpec(hosts=3, backend="slurm"), {"backend": "slurm", "hosts": 3, "simulated_hosts": 0}),
    "hosts by name": (
        GangSpec(hosts=2, options="-H h1:2,h2:2"),
        {"host_list": "h1:2,h2:2", "hosts": 2, "simulated_hosts": 0},
    ),
    "options take precedence": (
        GangSpec(processes=2, options=OPTIONS, backend="slurm"),
        {"partition": "debug", "grace": 7.0, "tag": "a b"},
    ),
}


@pytest.mark.parametrize(("spec", "expected"), JOBS.values(), ids=JOBS)
def test_a_spec_becomes_a_job(spec, expected):
    made = job(spec)
    assert {name: getattr(made, name) for name in expected} == expected
    assert made.program[-1] == "jaxrun_runtime.gang"


SIZES = [(name, value) for name in ("processes", "devices", "hosts") for value in (0, -1, True, 1.0, "2")]
REFUSED = [
    *(({name: value}, f"{name} of a gang must be a whole number from 1, not {value!r}") for name, value in SIZES),
    *(
        ({"env": {name: "x"}}, f"must not be empty, nor contain '=': env of a gang has '{name}'")
        for name in ("", "A=B")
    ),
    *(({"env": env}, r"env of a gang must map names to strings, not \{") for env in ({"A": 1}, {2: "x"}, {"A": None})),
    *(({"preload": preload}, "preload of a gang must be auto, none or names of modules") for preload in ("a b", ["9"])),
    ({"options": "--keep-survivors --max-restarts 1"}, "cannot have --keep-survivors: a gang that loses a rank starts"),
    *(
        ({"options": options}, "cannot have --max-restarts: a gang that loses a rank starts")
        for options in ("--grace 7 --max-restarts 1", ["--max-restarts=2"])
    ),
    *(({"options": options}, "options of a gang") for options in ("--env 'A", ["--grace", 5], 5)),
]


@pytest.mark.parametrize(("asked", "text"), REFUSED)
def test_what_cannot_be_is_refused(asked, text):
    with pytest.raises(UsageError, match=text):
        GangSpec(**asked)


FORKS = {
    "as it is": (GangSpec(), True),
    "cpu": (GangSpec(platform="cpu"), True),
    "cuda": (GangSpec(platform="cuda"), True),
    "a platform that has not been tried after a fork": (GangSpec(platform="rocm"), False),
    "another backend": (GangSpec(backend="mpirun"), False),
    "hosts by name": (GangSpec(options="-H h1,h2"), False),
    "on request": (GangSpec(options=("--no-fork",)), False),
}


@pytest.mark.parametrize(("spec", "forks"), FORKS.values(), ids=FORKS)
def test_which_ranks_may_be_forks(spec, forks):
    assert spec.may_fork is forks


def test_a_gangs_name_describes_its_spec():
    assert (str(GangSpec()), str(GangSpec(processes=4, devices=2))) == ("gang", "gang of 4 x 2 devices")
    assert str(GangSpec(devices=2, backend="slurm")) == "gang x 2 devices by slurm"


def test_a_spec_is_a_value_and_options_are_words_or_a_line_of_them():
    assert GangSpec(2, env={"A": "1"}) == GangSpec(processes=2, env={"A": "1"}) != GangSpec(processes=2)
    assert GangSpec(options="--env 'A=b c'") == GangSpec(options=["--env", "A=b c"]) != GangSpec()
    assert GangSpec(options="--env 'A=b c'").options == ("--env", "A=b c")


def test_modules_to_import_before_the_fork():
    assert [GangSpec(preload=preload).named_modules for preload in ("auto", "none", [], "a,b.c", ["a", "b.c"])] == [
        None,
        (),
        (),
        ("a", "b.c"),
        ("a", "b.c"),
    ]
    words = GangSpec().command_line(RUN_DIR, ("flax", "optax"))
    assert words[words.index("--preload") + 1] == "flax,optax"
    words = GangSpec().command_line(RUN_DIR)
    assert words[words.index("--preload") + 1] == "none"


def test_a_gang_accepts_the_fields_of_a_spec():
    wanted, taken = (inspect.signature(one).parameters.values() for one in (GangSpec, jaxrun.Gang))
    assert [(one.name, one.default) for one in taken] == [(one.name, one.default) for one in wanted]


# ---- the line after %gang


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("", MagicArguments()),
        ("stop", MagicArguments("stop")),
        ("restart", MagicArguments("restart")),
        ("--timeout 60", MagicArguments(timeout=60.0)),
        ("-n 4 -d 2", MagicArguments(gang=dict(processes=4, devices=2))),
        ("--hosts 2 -n 4", MagicArguments(gang=dict(processes=4, hosts=2))),
        (
            "--backend slurm --partition debug",
            MagicArguments(gang=dict(backend="slurm", options=("--partition", "debug"))),
        ),
        ("--platform cpu --env 'A=b c' --env D=", MagicArguments(gang=dict(platform="cpu", env={"A": "b c", "D": ""}))),
        ("-n 2 --timeout 1.5", MagicArguments(gang=dict(processes=2), timeout=1.5)),
        ("-n 4   # 4 processes, don't ask", MagicArguments(gang=dict(processes=4))),
        ("# nothing", MagicArguments()),
        ("stop  # it", MagicArguments("stop")),
        ("--env 'A=# b' --env B=c#d", MagicArguments(gang=dict(env={"A": "# b", "B": "c#d"}))),
        ("--help", MagicArguments("help")),
        ("-n 4 -h", MagicArguments("help")),
        ("--rank 0,2-3", MagicArguments(ranks=(range(0, 1), range(2, 4)))),
        ("--no-fork", MagicArguments(gang=dict(options=("--no-fork",)))),
        ("-n 2 --preload flax,optax", MagicArguments(gang=dict(processes=2, preload="flax,optax"))),
    ],
)
def test_a_line_is_parsed_as_options_of_jaxrun(line, arguments):
    assert parse_arguments(line) == arguments


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n x", "-n/--processes: 'x' is not a valid integer (%gang? "),
        ("-n", "-n requires an argument"),
        ("--timeout x", "--timeout: 'x' is not a time; write seconds, or 90s, "),
        ("-n 0", "processes of a gang must be a whole number from 1, not 0"),
        ("--backend k8s", "--backend: 'k8s' is not one of"),
        ("stpo", "not 'stpo'"),
        ("stop now", "not 'stop now'"),
        ("--rank one", "--rank takes ranks such as 1-3,7; 'one'"),
        ("--env 'A", "the line cannot be split into words: no closing quotation"),
    ],
)
def test_a_malformed_line_is_refused_with_the_word(line, message):
    with pytest.raises(UsageError) as caught:
        parse_arguments(line)
    assert message in str(caught.value)
