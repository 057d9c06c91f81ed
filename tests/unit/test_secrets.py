"""What must not show a secret: the environment of a program, and the text of values that loggers print."""

import importlib
import pkgutil
import types

import pytest
from fakes import fake_module
from msgspec import Struct
from msgspec.structs import replace

import jaxrun
import jaxrun_runtime
from jaxrun.cli.main import main
from jaxrun.errors import UsageError
from jaxrun.protocol.env import AgentEnv, WorkerEnv
from jaxrun.protocol.worker_messages import RankSecret
from jaxrun.spec.job import env_options
from jaxrun_runtime import own_frames, this_rank

SECRET = "5ec2e7" * 6
ENV = WorkerEnv("ab" * 16, 1, 2, 1, 2, "h1", run_dir="/runs/1", attempt=3, restart_reason="rank 0 died", stdin="0")
SEEN = ("ATTEMPT", "HOST", "JOB_ID", "LOCAL_RANK", "LOCAL_SIZE", "RANK", "RESTART_REASON", "RUN_DIR", "SIZE")
_HOLD_SECRETS = ("token", "rank_token", "env", "user_env", "set_env", "environ", "environment")
_CHOSEN = {
    ("Hello", "environment"),
    ("MpiFamily", "unbind_env"),
    ("ForkState", "environ"),
    *((name, "set_env") for name in ("PlannedJob", "PlanDocument", "JobFile")),  # masked
}  # a few variables that hold no secret


def _records() -> set[type]:
    found = set()
    for package in (jaxrun, jaxrun_runtime):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "child_site" in module.name or ".programs" in module.name or module.name.endswith("__main__"):
                continue
            values = vars(importlib.import_module(module.name)).values()
            found |= {each for each in values if isinstance(each, type) and issubclass(each, Struct)}
    return found


def test_no_record_shows_a_token_or_an_environment_in_its_text():
    fields = {
        (each, name): name not in getattr(each, "hidden", ()) for each in _records() for name in each.__struct_fields__
    }
    shown = {(record.__name__, name) for (record, name), is_shown in fields.items() if is_shown}
    assert {(record, name) for record, name in shown if name in _HOLD_SECRETS} <= _CHOSEN
    assert len([name for (_, name) in fields if name in _HOLD_SECRETS]) > 15  # they are still called so


def test_the_secret_of_the_ranks_is_in_no_variable_and_in_no_text():
    env = replace(ENV, rank_token=SECRET)
    assert SECRET not in str(env.to_env()) + repr(env) + repr(RankSecret(SECRET))
    assert SECRET not in repr(AgentEnv("ab" * 16, "h1:1", SECRET, "slurm", 1.0))


def test_a_program_sees_only_what_the_page_lists_and_a_rank_remembers_the_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(this_rank, "_told", None)
    environ = {**ENV.to_env(), "MINE": "1"}
    this_rank.keep(ENV, environ)
    assert sorted(name for name in environ if name.startswith("JAXRUN_")) == [f"JAXRUN_{name}" for name in SEEN]
    assert environ["MINE"] == "1" and this_rank.read({}) is ENV
    monkeypatch.setattr(this_rank, "_told", None)  # as in a process that the rank starts
    assert this_rank.read(environ) == replace(ENV, stdin="")


@pytest.mark.parametrize("text", [f"1KEY={SECRET}", f"JAXRUN_X={SECRET}", f"JAX_PROCESS_ID={SECRET}", f"A={SECRET}\0"])
def test_an_error_about_an_assignment_shows_no_value(text: str):
    for parse in (lambda: env_options.parse_assignment(text, {}), lambda: env_options.parse_env_file(text, "job.env")):
        with pytest.raises(UsageError) as caught:
            parse()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("line", [SECRET, f'KEY="{SECRET}', f"KEY='{SECRET}' more", f"export K={SECRET}\0"])
def test_an_error_about_a_line_of_a_file_shows_none_of_it(line: str):
    with pytest.raises(UsageError, match=r"job\.env:2: ") as caught:
        env_options.parse_env_file(f"# ours\n{line}", "job.env")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("words", [("--wrap", f"env TOKEN='{SECRET}"), ()], ids=["an option", "JAXRUN_ENV"])
def test_an_error_about_an_open_quote_shows_no_value(words, monkeypatch, capsys: pytest.CaptureFixture[str]):
    if not words:
        monkeypatch.setenv("JAXRUN_ENV", f"API_TOKEN='{SECRET}")
    assert main([*words, "train.py"]) == 2
    shown = capsys.readouterr().err
    assert SECRET not in shown and "TOKEN=…' cannot be split into words" in shown


def test_an_error_about_a_value_of_megabytes_is_short(capsys: pytest.CaptureFixture[str]):
    assert main(["--env", "x" * 5_000_000, "train.py"]) == 2
    assert main(["-n", "7" * 5_000_000 + "x", "train.py"]) == 2
    shown = capsys.readouterr().err
    assert len(shown) < 5000 and "passes a variable on" in shown and "-n/--processes" in shown


def test_loguru_leaves_out_the_frames_of_jaxrun():
    module = types.ModuleType("loguru._better_exceptions")

    class ExceptionFormatter:
        def __init__(self, colorize=False, hidden_frames_filename=None):
            self.colorize, self.hidden = colorize, hidden_frames_filename

        def kept(self, *files: str) -> list[str]:
            return [file for file in files if file != self.hidden]  # as loguru compares them

    module.ExceptionFormatter = ExceptionFormatter
    own_frames._hide_from_loguru(module)
    formatter = ExceptionFormatter(True, hidden_frames_filename="/site-packages/loguru/_logger.py")
    ours = ("/x/jaxrun_runtime/worker.py", "/x/jaxrun/protocol/env.py", "<frozen runpy>")
    assert formatter.colorize
    assert formatter.kept("/site-packages/loguru/_logger.py", *ours, "/job/train.py") == ["/job/train.py"]
    assert ExceptionFormatter().kept(*ours, "train.py") == ["train.py"]


def test_a_loguru_without_that_argument_is_left_as_it_is():
    class ExceptionFormatter:
        pass

    before = ExceptionFormatter.__init__
    own_frames._hide_from_loguru(fake_module("loguru", ExceptionFormatter=ExceptionFormatter))
    own_frames._hide_from_loguru(fake_module("loguru"))
    assert ExceptionFormatter.__init__ is before
