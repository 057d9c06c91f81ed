"""The line after %gang."""

import pytest

from jaxrun.errors import UsageError
from jaxrun.gang.spec import GangSpec
from jaxrun.notebook.arguments import MagicArguments, parse_arguments


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("", MagicArguments()),
        ("stop", MagicArguments("stop")),
        ("restart", MagicArguments("restart")),
        ("--timeout 60", MagicArguments(timeout=60.0)),
        ("-n 4 -d 2", MagicArguments(spec=GangSpec(processes=4, devices=2))),
        ("--hosts 2 -n 4", MagicArguments(spec=GangSpec(processes=4, hosts=2))),
        (
            "--backend slurm --partition debug",
            MagicArguments(spec=GangSpec(backend="slurm", options=("--partition", "debug"))),
        ),
        (
            "--platform cpu --env 'A=b c' --env D=",
            MagicArguments(spec=GangSpec(platform="cpu", env={"A": "b c", "D": ""})),
        ),
        ("-n 2 --timeout 1.5", MagicArguments(spec=GangSpec(processes=2), timeout=1.5)),
        ("-n 4   # 4 processes, don't ask", MagicArguments(spec=GangSpec(processes=4))),
        ("# nothing", MagicArguments()),
        ("stop  # it", MagicArguments("stop")),
        ("--env 'A=# b' --env B=c#d", MagicArguments(spec=GangSpec(env={"A": "# b", "B": "c#d"}))),
        ("--help", MagicArguments("help")),
        ("-n 4 -h", MagicArguments("help")),
        ("--rank 0,2-3", MagicArguments(ranks=(range(0, 1), range(2, 4)))),
        ("--no-fork", MagicArguments(spec=GangSpec(options=("--no-fork",)))),
    ],
)
def test_a_line_is_parsed_as_options_of_jaxrun(line, arguments):
    assert parse_arguments(line) == arguments


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n x", "'x' is not a valid integer"),
        ("-n 0", "processes of a gang must be a whole number from 1, not 0"),
        ("--backend k8s", "'k8s' is not one of"),
        ("stpo", "not 'stpo'"),
        ("stop now", "not 'stop now'"),
        ("--rank one", "--rank takes ranks such as 1-3,7; 'one'"),
        ("--env 'A", "No closing quotation"),
    ],
)
def test_a_malformed_line_is_refused_with_the_word(line, message):
    with pytest.raises(UsageError) as caught:
        parse_arguments(line)
    assert message in str(caught.value)
