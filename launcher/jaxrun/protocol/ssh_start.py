"""What the starter of the ssh backend, the agents that it starts, and the supervisor agree on.

    starter (node/ssh)                                     host
                 ──────── ssh HOST REMOTE_COMMAND ───────▶
                 ◀───────────── MARK version ─────────────  an interpreter runs; nothing was sent to a shell before
                 ───────────── code, message ────────────▶  by standard input, where no other user can read it
                 ◀──────── MARK {"wants_carried": …} ─────  where jaxrun is carried, and the host has no copy of it yet
                 ──────────────── jaxrun ────────────────▶
                 ◀────────── MARK {"problem": …} ─────────  empty if the agent can start; the process becomes the agent
                 ◀─────────────── FOUND ──────────────────  the agent is connected to the head

If hosts fail, the starter says why in words for people, and then in one line for the supervisor which agents these are.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import asdict

from jaxrun.protocol.agent_id import AgentId

TUNNEL_AUTO, TUNNEL_ON, TUNNEL_OFF = TUNNEL_MODES = ("auto", "on", "off")
FOUND = "jaxrun-agent-found-head"  # what an agent with AGENT_RANKS prints once it is connected
_FAILED_AGENTS = "jaxrun-failed-agents"


class CarriedEnvironment(Struct, frozen=True):
    """The launcher's environment, which --stage brings to a host.

    python, prefix:  its interpreter and its directory, as paths on the launcher's host
    path:            the directories below it in which Python finds packages
    """

    python: str
    prefix: str
    path: tuple[str, ...]

    def to_text(self) -> str:
        import json  # takes a while, and the command line needs none of it

        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> CarriedEnvironment:
        import json

        found = json.loads(text)
        return cls(found["python"], found["prefix"], tuple(found["path"]))


def format_failed_agents(agents: list[AgentId]) -> str:
    """Return the line for the supervisor."""
    return f"{_FAILED_AGENTS} {','.join(map(str, agents))}"


def split_failed_agents(output: str) -> tuple[list[str], set[AgentId]]:
    """Return the other lines of a starter's output, and the agents that could not be started."""
    lines, failed = list[str](), set[AgentId]()
    for line in output.splitlines():
        name, _, numbers = line.partition(" ")
        if name == _FAILED_AGENTS:
            failed |= {AgentId(int(number)) for number in numbers.split(",") if number.isdecimal()}
        else:
            lines.append(line)
    return lines, failed
