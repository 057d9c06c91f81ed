"""The ssh backend: which agents it starts where, what is on its command line, and what is said of hosts that fail."""

import json
import os
import sys
from pathlib import Path

import pytest

from jaxrun.cli.make_job import make_job, without_effect
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.node.ssh import host_failures
from jaxrun.node.ssh.remote_command import HostStart, remote_command, start_message
from jaxrun.node.ssh.remote_shell import qrsh
from jaxrun.protocol.ssh_start import format_failed_agents, split_failed_agents
from jaxrun.spec.backends import mpirun
from jaxrun.spec.backends.planning import command_on, replan
from jaxrun.spec.engines.ssh import plan
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV
from jaxrun.spec.job.rank_placement import Placement

ID = "0123456789abcdef" * 2
ENVIRON = {"PATH": "/usr/bin:/bin", "HF_TOKEN": "hunter2"}
RESTARTS = {"max_restarts": 1}


@pytest.fixture(autouse=True)
def ssh_on_path(tmp_path_factory, monkeypatch):
    """A file "ssh" is on PATH: these tests start none, and run also on machines without it."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "ssh").touch(0o755)
    monkeypatch.setitem(ENVIRON, "PATH", f"{folder}:/usr/bin:/bin")


def planned(**request):
    return plan(Job(program=("train.py",), backend="ssh", **request), ENVIRON, ID)


def test_each_host_has_one_agent_with_all_its_ranks_and_survives_the_others():
    made = planned(host_list="h1:2,h2:1,h3:2", spares=1, **RESTARTS)
    command = made.launch_command
    assert [worker.host for worker in made.workers] == ["h1", "h1", "h2"]
    assert made.placement.agents == {0: (0, 1), 2: (2,), 3: ()} == command.agents
    assert [command.agent_hosts[agent] for agent in made.placement.agents] == ["h1", "h2", "h3"] and command.size == 3
    assert command.survive_host_loss and command.agents_stay
    end = command.argv.index("--")
    assert command.argv[end - 2 : end] == ("h1=0-1", "h2=2-2") and command.argv[end + 1 :] == AGENT_ARGV


def test_no_value_of_a_variable_is_on_the_command_line():
    command = planned(host_list="h1,h2", env={"KEY": "swordfish"}).launch_command
    assert not any(secret in " ".join(command.argv) for secret in ("hunter2", "swordfish"))
    for pythons in (["/opt/python"], ["/opt/python", "python3.13"]):
        line = remote_command(pythons, "mark")
        assert not set(line) & set("\\!\n`") and line.count("'") == 2, line  # means the same in every login shell
        assert "$" not in line.partition("'")[0] + line.rpartition("'")[2]


def test_the_message_to_a_host_has_the_rest():
    message = start_message("mark", HostStart(["python", "-m", "x"], "python", "/data", "0.1", {"JAXRUN_TOKEN": "t"}))
    code, length, told = message.split(b"\n", 2)
    compile(code, "sent", "exec")
    assert len(told) == int(length) and json.loads(told)["env"] == {"JAXRUN_TOKEN": "t"}


def test_a_lost_host_is_replaced_and_a_host_alone_can_be_asked():
    made = planned(host_list="h1:2,h2:2,h3:2", spares=1, **RESTARTS)
    again = replan(made, Placement(("h1", "h1", "h3", "h3")), ENVIRON)
    assert again.placement.agents == {0: (0, 1), 2: (2, 3)} and again.launch_command.argv.count("h3=2-3") == 1
    asked = command_on(made, "h3", ("/bin/true",), ENVIRON).argv
    assert asked[asked.index("--") - 1 :] == ("h3=0-0", "--", "/bin/true")


def test_impossible_requests_are_refused_with_what_to_type(monkeypatch):
    with pytest.raises(UsageError, match="-H h1:4,h2:4, or --hostfile"):
        planned()
    with pytest.raises(UsageError, match="--remote-python '/a b/python'"):
        planned(host_list="h1", remote_python="/a b/python")
    with pytest.raises(UnavailableError, match="apt-get install openssh-client"):
        plan(Job(program=("train.py",), backend="ssh", host_list="h1"), {"PATH": "/nowhere"}, ID)
    with monkeypatch.context() as changed:
        changed.setattr("sys.executable", "/a b/python")
        with pytest.raises(UsageError, match="path of this Python, '/a b/python', has characters"):
            planned(host_list="h1")
        assert "/opt/python" in planned(host_list="h1", remote_python="/opt/python").launch_command.argv
    with pytest.raises(UsageError, match="--remote-python is for --backend ssh"):
        Job(program=("train.py",), backend="local")
        make_job({"program": ("train.py",), "remote_python": "/x"}, ENVIRON)


def test_hosts_without_a_backend_get_mpirun_if_there_is_one_and_else_ssh(tmp_path, monkeypatch):
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "python"))
    given, empty = {"program": ("train.py",), "host_list": "h1:2,h2:2"}, {"PATH": str(tmp_path)}
    assert make_job(given, empty).backend == "ssh"
    assert make_job({**given, "mpi_args": ["--x"]}, empty).backend == "mpirun"
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert make_job(given, empty).backend == "mpirun"
    assert make_job({**given, "remote_python": "/opt/python"}, empty).backend == "ssh"
    values = {**given, "remote_python": "/opt/python", "partition": "debug"}
    assert without_effect(values, {"remote_python", "partition"}, empty) == {"remote_python", "partition"}


SAID = {
    "ssh: connect to host h2 port 22: Connection refused": "does sshd run there",
    "ssh: connect to host h2 port 22: Connection timed out": "is it on",
    "ssh: Could not resolve hostname h2: Name or service not known": "HostName in ~/.ssh/config",
    "No ED25519 host key is known for h2.\nHost key verification failed.": "ssh h2 once",
    "root@h2: Permission denied (publickey,password).": "ssh-copy-id h2",
    "kex: no match": "ssh -v h2 true",
}


@pytest.mark.parametrize("said", SAID)
def test_sshs_own_words_are_shown_with_what_to_type(said):
    text = host_failures.describe_failures({"h2": host_failures.ssh_failed("h2", f"* banner\r\n{said}\r\n")}, 3)
    assert said.replace("\n", "\n    ") in text and SAID[said] in text and text.startswith("1 of 3 hosts cannot")


def test_a_changed_host_key_is_distinguished_from_an_unknown_one():
    said = f"{'@' * 59}\n@  WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\n"
    assert "ssh-keygen -R h2" in host_failures.ssh_failed("h2", said).advice


def test_hosts_that_fail_for_the_same_reason_are_named_together():
    failures = {host: host_failures.cannot_start("version", "", "/opt/python") for host in ("h1", "h3")}
    text = host_failures.describe_failures({**failures, "h2": host_failures.check_python("3.6.8", carries=False)}, 3)
    assert "h1, h3: /opt/python has no jaxrun\n" in text and "h2: has Python 3.6.8\n" in text
    lines, failed = split_failed_agents(f"{text}\n{format_failed_agents([0, 4])}\n")
    assert (lines, failed) == (text.split("\n"), {0, 4})


def test_a_staged_environment_goes_to_any_python_of_its_version(tmp_path, monkeypatch):
    own = ".".join(map(str, sys.version_info[:2]))
    carrying = planned(host_list="h1", stage=(Path("venv"),), stage_dir=Path("/disk")).launch_command.argv
    assert {"--carry", "/disk", sys.executable, f"python{own}"} < set(carrying) and "--stages-directory" not in carrying
    assert "--carry" in planned(host_list="h1", stage=(Path(sys.prefix),)).launch_command.argv
    monkeypatch.chdir(tmp_path)
    argv = planned(host_list="h1", stage=(Path(".."),), remote_python="/opt/python").launch_command.argv
    assert "--carry" not in argv and "--stages-directory" in argv and sys.executable not in argv[1:8]
    assert host_failures.check_python(f"{own}.7", carries=True) is None
    failure = host_failures.check_python("3.99.0", carries=True)
    assert "is for Python " + own in failure.words and "--remote-python PATH, for a Python" in failure.advice
    assert host_failures.check_python("3.99.0", carries=False) is None


def test_what_lacks_on_a_host_is_named_with_the_option_that_carries_it():
    said = host_failures.no_interpreter("/opt/python", 127, "sh: /opt/python: not found", carries=False)
    assert said.words == "sh: /opt/python: not found" and "--stage venv" in said.advice
    assert "--stage venv" not in host_failures.no_interpreter("/opt/python", 127, "", carries=True).advice
    assert "--stage . carries" in host_failures.cannot_start("directory", "/data: No such file", "python").advice
    assert "--stage venv carries" in host_failures.cannot_start("version", "", "python").advice
    assert "(aarch64)" in host_failures.cannot_start("machine", "aarch64", "python").words


def test_this_interpreter_is_the_default_on_the_hosts():
    assert sys.executable in AGENT_ARGV and os.getcwd() in planned(host_list="h1").launch_command.argv


def test_qrsh_runs_a_line_on_other_hosts_and_its_refusal_says_what_grid_engine_needs():
    shell = qrsh("/bin/qrsh", here="h1")
    assert shell.command("h1", "exec x") == ("/bin/sh", "-c", "exec x")
    assert shell.command("h2", "exec x") == ("/bin/qrsh", "-inherit", "h2", "exec x")
    # As Grid Engine 8.1.9 printed it.
    said = """error: executing task of job 8 failed: execution daemon on host "h2" didn't accept task\n"""
    failure = shell.failure("h2", 1, said)
    assert "didn't accept task" in failure.words and "control_slaves TRUE: qconf -sp NAME" in failure.advice
    assert shell.failure("h2", 127, "sh: 1: exec: /opt/python: not found\n") is None
    assert host_failures.describe_failures({"h2": failure}, 3, "qrsh").startswith("1 of 3 hosts cannot be used by qrsh")
