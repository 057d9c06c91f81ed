"""The plan of `jaxrun attach`: the processes are there, and rank 0 starts its own agent as all others are started."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.backends.remote_plan import plan_remote
from jaxrun.job.cluster_env import CLUSTER_ENVS, RankInfo
from jaxrun.job.job import Job
from jaxrun.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.text import UNKNOWN_HOST


def plan_attached(job: Job, rank_info: RankInfo, environ: Mapping[str, str], job_id: str) -> Plan:
    """Plan the job of which this process is rank 0; the hosts of the ranks are known when their agents report."""
    titles = {engine.key: engine.title for engine in CLUSTER_ENVS}
    command = LaunchCommand(
        engine=rank_info.engine,
        title="the agent of rank 0",
        argv=(*AGENT_ARGV, "0", str(rank_info.size)),
        attached_to=titles.get(rank_info.engine, "processes started by hand"),
    )
    return plan_remote(job, environ, job_id, command, [UNKNOWN_HOST] * rank_info.size)
