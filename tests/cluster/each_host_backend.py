"""An engine as users may write one: ssh starts one agent on each host, which holds all ranks of that host.

It is all that jaxrun must be told about such an engine, besides the row in the table of engines. The token stands in
the words of a command here, where others can read it: a real backend must send it another way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from jaxrun.protocol.agent_id import AgentId
from jaxrun.spec.backends.forwarded_variables import forwarded_variables
from jaxrun.spec.backends.mpi_hosts import named_hosts, place_ranks
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.engine import Engine
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan

_START = """
import json, os, shlex, subprocess, sys
directory, names, commands = json.loads(sys.argv[1])
env = shlex.join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
start = f"cd {shlex.quote(directory)} && exec env {env}"
remote = {host: f"{start} {shlex.join(words)}" for host, words in commands.items()}
started = [subprocess.Popen(["ssh", host, line], stdin=subprocess.DEVNULL) for host, line in remote.items()]
sys.exit(max([process.wait() for process in started]))
"""
EACH_HOST = Engine(key="each-host", title="ssh to each host")


def plan(job: Job, environ: Mapping[str, str], job_id: str) -> Plan:
    hosts = place_ranks(named_hosts(job), job.processes, job.processes_per_host)
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    commands = {host: [*AGENT_ARGV, f"{ranks[0]}-{ranks[-1]}", str(len(hosts))] for host, ranks in ranks_of.items()}
    told = json.dumps([os.getcwd(), forwarded_variables(environ, job.env), commands])
    command = LaunchCommand(
        engine=EACH_HOST,
        title="ssh to each host",
        argv=(sys.executable, "-c", _START, told),
        agents={AgentId(ranks[0]): tuple(ranks) for ranks in ranks_of.values()},
    )
    return plan_remote(job, environ, job_id, command, hosts)
