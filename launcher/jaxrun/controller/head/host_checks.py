"""What --host-check says of the hosts, one rank of each of which is asked before the workers of an attempt start."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxrun.errors import UnavailableError
from jaxrun.protocol.names import RESERVED_PREFIX
from jaxrun.protocol.probe_messages import CheckHost, HostChecked
from jaxrun.records.event_log.actions import Send
from jaxrun.spec.job.plan import Plan

CHECK_GRACE_S = 10.0  # for agents to tell how a check has ended


class HostCheckError(UnavailableError):
    """Hosts have failed; `failed` has by rank, the one that was asked, what was wrong."""

    def __init__(self, failed: Mapping[int, str], hosts: Mapping[int, str]) -> None:
        self.failed = failed
        super().__init__("; ".join(f"{hosts[rank]} failed --host-check: {why}" for rank, why in sorted(failed.items())))


class HostChecks:
    """The checks of one attempt; `awaited` are the ranks that have not answered, None before they are asked."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._failed: dict[int, str] = {}
        self.awaited: set[int] | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return not self._plan.job.host_check or self.awaited == set()

    def order(self, rank: int, host: str) -> CheckHost:
        """What the agent of this rank is to do."""
        job = self._plan.job
        told = {"HOST": host, "RANK": str(rank), "ATTEMPT": str(self._plan.attempt)}  # by the rank, guards find it
        variables = {f"{RESERVED_PREFIX}{name}": value for name, value in told.items()}
        return CheckHost(rank, job.host_check, job.init_timeout, {**job.env, **variables})

    def begin(self, ranks: Collection[int], hosts: Mapping[int, str]) -> list[Send]:
        """Ask these ranks."""
        self.awaited = set(ranks)
        return [Send((rank,), self.order(rank, hosts[rank])) for rank in ranks]

    def handle(self, event: HostChecked, hosts: Mapping[int, str]) -> None:
        """Raises HostCheckError once all have answered, if some hosts have failed."""
        assert self.awaited is not None
        self.awaited.discard(event.rank)
        if event.failure:
            self._failed[event.rank] = event.failure
        if not self.awaited and self._failed:
            raise HostCheckError(self._failed, hosts)
