"""The number of an agent: a type of its own, so that mypy does not confuse it with a rank.

An agent keeps its number as long as its job lasts. The head assigns its ranks, which may change with each attempt:
several on a host with one agent, one under MPI and Slurm, none while the agent waits on a spare host.
"""

from __future__ import annotations

from typing import NewType

AgentId = NewType("AgentId", int)
