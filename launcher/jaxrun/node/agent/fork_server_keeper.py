"""Keeps a fork server that was started during one attempt for the workers of the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxrun.node.forkserver import early
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.spec.job.plan import Plan


class ForkServerKeeper:
    """The fork server that waits for the next attempt's workers, if there is one."""

    def __init__(self, environ: Mapping[str, str], first: ForkServer | None = None) -> None:
        """`environ` is the agent's own; `first` was started for the first attempt."""
        self._environ = environ
        self._kept = first
        self._kept_env: dict[str, str] | None = None  # None: that of any plan

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._kept.pid,) if self._kept is not None else ()

    def start(self, plan: Plan) -> ForkServer | None:
        """A new fork server for workers of this plan."""
        return early.server_for(replace(plan, fork=True), self._environ, None)

    def keep(self, server: ForkServer | None, plan: Plan) -> None:
        """Keep a server for the next attempt, which has been started for this plan."""
        self._kept, self._kept_env = server, plan.base_env(self._environ)

    def take(self, plan: Plan) -> ForkServer | None:
        """The server that was kept, if it lives and its workers get the environment of this plan."""
        server, self._kept = self._kept, None
        if server is not None and (server.has_gone or self._kept_env not in (None, plan.base_env(self._environ))):
            server.close()
            return None
        return server

    def close(self) -> None:
        """Let the server end that waits."""
        if self._kept is not None:
            self._kept.close()
