"""The head of one attempt, for those around it: events go in, and its actions wait until someone takes them.

    agents, signals, clients, timers ── handle(event) ──▶ AttemptHead ──▶ Dispatcher ──▶ Head
                                                             │ actions wait in a queue
    agents, screen, terminal ◀── AttemptLoop ◀── take_actions ─┘

It knows no agents: these hand it what happens to them, and the attempt's loop (attempt_loop.py), which has both,
executes the actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from jaxrun.controller.head.head import Head
from jaxrun.controller.supervisor.dispatcher import Dispatcher
from jaxrun.controller.supervisor.supervision import Supervision
from jaxrun.job_events.actions import Action
from jaxrun.job_events.events import Event, FreshInterpreters
from jaxrun.protocol.agent_messages import AgentMessage, AtPrompt, FirstOutput, ForkingDeclined
from jaxrun.protocol.flight import ToldStep
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.names import GANG_ADDRESS
from jaxrun.protocol.worker_messages import Done, Failed
from jaxrun.records.event_log.event_log import LoggedMessage
from jaxrun.spec.job.option_checks import PRELOAD_AUTO


class AttemptHead:
    """What the events of one attempt are handed to.

    loop:  the event loop of the attempt, in which agents are served
    """

    def __init__(self, shared: Supervision, head: Head, attempt: int, *, preload: str = PRELOAD_AUTO) -> None:
        """`attempt` is its number, for the log; `preload` is the value of --preload."""
        self.loop = shared.loop.part()  # for what ends with this attempt
        self._head = head
        self._dispatcher = dispatcher = Dispatcher(head, shared.directory, shared.outside.server, shared.clock, attempt)
        self._output = shared.output
        self._output.set_hosts(lambda: dispatcher.hosts)
        self._due: deque[Sequence[Action]] = deque()
        is_gang = GANG_ADDRESS in shared.environ  # its launcher names the modules that its parent has found
        self._named = set() if is_gang else set(preload.split(",")) - {PRELOAD_AUTO}
        self.loop.add_timer(dispatcher.deadline, lambda: self._due.append(dispatcher.handle_timeouts()))

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as known."""
        return self._dispatcher.hosts

    @property
    def is_healthy(self) -> bool:
        """Whether nothing has happened yet that ends the job, as far as the head knows."""
        return self._head.is_healthy

    @property
    def told_step(self) -> ToldStep | None:
        """The steps that the program has told."""
        return self._dispatcher.told_step

    def handle(self, event: Event) -> None:
        """Pass an event to the head; its actions follow once the current callback of the loop has returned."""
        self._due.append(self._dispatcher.handle(event))

    def receive(self, message: AgentMessage) -> None:
        """Pass an agent's report to the head, unless it is only logged."""
        match message:
            case FirstOutput():
                self.record(message)
            case AtPrompt():
                self._output.show_prompt(message.rank)
            case Preloaded():
                self.record(message)
                self._show_left_out(message)
            case ForkingDeclined():
                self.record(FreshInterpreters(message.reason))
            case _:
                if isinstance(message, (Done, Failed)):
                    self._output.note_end(message.rank)
                self.handle(message)

    def record(self, message: LoggedMessage) -> None:
        """Log a message that the head does not need."""
        self._dispatcher.record(message)

    def take_actions(self) -> Iterator[Sequence[Action]]:
        """Yield what the head wants, in its order, one event's actions after the other's, until nothing is due."""
        while self._due:
            yield self._due.popleft()

    def _show_left_out(self, preloaded: Preloaded) -> None:
        """Print why a module that the user named is left to the ranks; once for all hosts."""
        for name in sorted(self._named & preloaded.left_out.keys()):
            self._output.print_line(f"jaxrun: --preload {name}: {preloaded.left_out[name]}; left to the program")
            self._named.remove(name)
