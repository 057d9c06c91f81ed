"""The number of an agent: another thing than a rank, which mypy tells apart from it.

An agent keeps its number as long as its job lasts. Its ranks are decided by the head, and may change with each attempt:
several on a host with one agent, one under MPI and Slurm, none while the agent waits on a spare host.
"""

from __future__ import annotations

from typing import NewType

AgentId = NewType("AgentId", int)
