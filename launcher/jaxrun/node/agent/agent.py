"""Supervises the workers of one host: reports their messages and exits to the head, and executes the head's orders.

The head is in this process, or elsewhere: the owner of the event loop passes reports and orders on. The agent's process
is the parent of its workers and, as a subreaper, of everything that they leave behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from jaxrun.analysis.diagnosis.stacks import FATAL_ERROR
from jaxrun.errors import EXIT_SOFTWARE, ProtocolError
from jaxrun.files import procfs
from jaxrun.job_events.events import check_event
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.memory_watch import INTERVAL_S, MemoryWatch
from jaxrun.node.agent.mpi_memory import MpiMemory
from jaxrun.node.agent.oom import OomWatch, kernel_log
from jaxrun.node.agent.pipes import OutputPipes, OutputSink, Pipe
from jaxrun.node.agent.process_tree import kill_rest_of_group
from jaxrun.node.agent.prompt_watch import PromptWatch
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.node.agent.worker_inspector import WorkerInspector
from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.node.channel.event_loop import LoopPart
from jaxrun.protocol.agent_messages import (
    AgentMessage,
    AtPrompt,
    FaultNotInjected,
    FirstOutput,
    ForkingDeclined,
    InjectFault,
    RankOrder,
    SignalWorker,
    StartAgain,
    WorkerExited,
    WorkerOrder,
)
from jaxrun.protocol.debugpy_messages import DebugpyStart
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.query_messages import (
    FlightAtEnd,
    ProgramDetailsReply,
    ProgramDetailsRequest,
    RankDetail,
    RankQuery,
)
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun.protocol.worker_messages import Done, Failed, MpiImported, ProfileCalls, WorkerStage

MESSAGES, LISTENER, SIGNALS, OUTPUT = range(4)  # the order in which an event loop serves its readable descriptors
_CALLS_WITH_DETAILS = 256  # last calls of a rank that go with the details of a program


class Agent:
    """All workers of one host, or of one task, in one attempt."""

    def __init__(
        self,
        loop: LoopPart,
        workers: WorkerGroup,
        output: OutputSink,
        report: Callable[[AgentMessage], None],
        clock: Callable[[], float],
        guard: Guard | None = None,
    ) -> None:
        """`report` passes events to the head, and may lead to orders before it returns.

        guard:  removes what ranks of an MPI have left in shared memory if this process is killed
        """
        self._loop = loop
        self._workers = workers
        self._output = output
        self._report = report
        self._clock = clock
        self._reader = workers.setup.reader
        self._prompts = PromptWatch(self._reader_is_at_work, clock)
        self._pipes = OutputPipes(output, lambda rank: report(FirstOutput(rank)), self._note_output)
        cgroup = procfs.own_memory_cgroup()
        self._oom = OomWatch(cgroup, kernel_log())
        self._memory = MemoryWatch(cgroup)
        self._memory_due = clock() + INTERVAL_S
        self._peak_bytes: dict[int, int] = {}  # of memory, by rank
        self._mpi_memory = MpiMemory(guard.add_file if guard is not None else lambda path: None)
        self._inspector = WorkerInspector(workers, output, self._memory, clock)

    def start(self) -> None:
        """Start the workers, and serve them in the loop from now on."""
        loop, workers = self._loop, self._workers
        loop.add_poller(self._pause_or_resume_output)
        loop.add_timer(self._inspector.deadline, self._report_replies)
        loop.add_timer(lambda: self._memory_due, self._watch_memory)
        loop.add_timer(lambda: self._prompts.deadline, self._report_prompt)
        events = workers.start()
        if workers.fork_server is not None:
            loop.add_reader(workers.fork_server.channel.fileno(), MESSAGES, self._on_fork_server)
        self._add_workers(workers.ranks, events)

    def close(self) -> None:
        """Deliver what is still in the pipes, and close everything."""
        self._inspector.close()
        self._pipes.close()
        self._workers.close()
        self._mpi_memory.remove()
        self._oom.close()

    # ---- orders of the head

    def execute(self, ranks: Iterable[int], order: RankOrder) -> None:
        """Execute an order about these ranks; an order for their workers is forwarded to them."""
        there = [rank for rank in ranks if rank in self._workers.ranks]
        if isinstance(order, SignalWorker):
            self._signal(there, order.signum)
        else:
            for rank in there:
                self._deliver(rank, order)

    def signal_all(self, signum: int) -> None:
        self._signal(tuple(self._workers.ranks), signum)

    def _signal(self, ranks: Sequence[int], signum: int) -> None:
        if signum == signal.SIGKILL:
            for rank in ranks:
                self._pipes.hide(rank)  # its resource tracker will complain about what it had no time to remove
        for rank in ranks:
            self._workers[rank].signal(signum)

    def _deliver(self, rank: int, message: WorkerOrder) -> None:
        worker = self._workers[rank]
        match message:
            case InjectFault():
                if reason := worker.inject_fault(message.kind):
                    self._report(FaultNotInjected(rank, message.kind, reason))
            case StartAgain():
                self._start_again(rank)
            case RankQuery():
                if message.detail is RankDetail.SIGTERM:
                    self._pipes.read_ready()  # the line that tells was written a moment before
                self._report_all(self._inspector.request(rank, message))
            case ProgramDetailsRequest():
                details = worker.flight.program_details(message.program)
                last_calls = worker.flight.history(_CALLS_WITH_DETAILS)
                self._report(ProgramDetailsReply(rank, message.program, details, last_calls))
            case ProfileCalls():
                worker.send(message)
                worker.flight.raise_orders()
            case DebugpyStart():
                worker.send(message)
                worker.signal(STACKS_SIGNAL)  # its thread for stacks looks for the message
            case _:
                worker.send(message)

    # ---- events

    def on_child_exit(self) -> None:
        """Handle SIGCHLD: report the ends of workers, and the results of a py-spy that has ended."""
        self._reap()
        self._report_replies()

    def _report_all(self, events: Iterable[AgentMessage]) -> None:
        for event in events:
            self._report(event)

    def _add_workers(self, ranks: Iterable[int], events: Iterable[AgentMessage]) -> None:
        """Listen to the new workers of these ranks, then report the events of their start.

        A rank whose worker could not be started is left out.
        """
        for worker in (self._workers[rank] for rank in ranks if rank in self._workers.ranks):
            self._loop.add_reader(worker.pipes.channel.fileno(), MESSAGES, partial(self._on_channel, worker))
            self._pipes.add(worker.rank, worker.pipes.out, worker.pipes.err)
        self._report_all(events)

    def _start_again(self, rank: int) -> None:
        """Start another process for a rank whose process has ended, and kill what that has left."""
        ended = self._workers[rank]
        if ended.live or ended.pid == 0:  # the head has not been told of its end: the order is not for this process
            return
        kill_rest_of_group(ended.child)
        self._pipes.end(rank)
        events = self._workers.start_again(rank)
        server = self._workers.fork_server
        if server is not None and not self._loop.has_reader(server.channel.fileno()):
            self._loop.add_reader(server.channel.fileno(), MESSAGES, self._on_fork_server)
        self._add_workers((rank,), events)

    def _pause_or_resume_output(self) -> None:
        """Read the workers' pipes only while the output accepts more; full pipes then stop the workers."""
        fd = self._pipes.fileno()
        if self._output.congested:
            self._loop.remove_reader(fd)
        elif not self._loop.has_reader(fd):
            self._loop.add_reader(fd, OUTPUT, self._pipes.read_ready)

    def _on_fork_server(self) -> None:
        server = self._workers.fork_server
        assert server is not None
        fd = server.channel.fileno()
        events = self._workers.receive_forked()
        if self._workers.fork_server is None:
            self._loop.remove_reader(fd)
        self._report_all(events)
        if self._workers.declined:
            self._report(ForkingDeclined(self._workers.declined))
            waiting = self._workers.waiting
            for rank in waiting:
                self._loop.remove_reader(self._workers[rank].pipes.channel.fileno())
                self._pipes.remove(rank)
            self._add_workers(waiting, self._workers.start_fresh())

    def _on_channel(self, worker: WorkerProcess) -> None:
        fd = worker.pipes.channel.fileno()
        try:
            messages = worker.receive()
            for message in messages or ():
                check_event(message, ranks=(worker.rank,))
        except ProtocolError as error:
            self._loop.remove_reader(fd)
            worker.pipes.channel.close()  # the worker ends when it notices
            text = f"something wrote to jaxrun's channel in the worker: {error}"
            self._report(
                Failed(worker.rank, self._clock(), WorkerStage.PROGRAM, EXIT_SOFTWARE, "ProtocolError", text, "")
            )
            return
        if messages is None:
            self._loop.remove_reader(fd)
        for message in messages or ():
            if isinstance(message, Failed):
                self._output.logs.write_file(worker.rank, "err", message.traceback.encode())
            if isinstance(message, MpiImported):
                self._mpi_memory.note(worker.pid)
            if isinstance(message, CheckpointSaved):  # perhaps in memory
                self._workers.hold_snapshots()
            if isinstance(message, (Failed, Done)):
                self._read_memory(worker)
                self._report_flight(worker)
            self._report(message)

    def _report_flight(self, worker: WorkerProcess) -> None:
        flight = worker.read_new_flight()
        if flight is not None:
            self._report(FlightAtEnd(worker.rank, flight, worker.core_wait_seconds()))

    def _report_replies(self) -> None:
        self._report_all(self._inspector.poll())

    def _note_output(self, pipe: Pipe, data: bytes) -> None:
        if pipe.rank == self._reader:
            self._prompts.note_output(pipe.stream, data)

    def _reader_is_at_work(self) -> bool:
        """Whether the rank with the standard input certainly reads nothing now."""
        if self._reader is None or self._reader not in self._workers.ranks:
            return False
        worker = self._workers[self._reader]
        return worker.live and worker.is_at_work

    def _report_prompt(self) -> None:
        if self._prompts.poll() and self._reader is not None:
            self._report(AtPrompt(self._reader))

    def _watch_memory(self) -> None:
        now = self._clock()
        self._memory_due = now + INTERVAL_S
        self._oom.forget_old(now)
        live = [worker for worker in self._workers if worker.live]
        self._mpi_memory.look(worker.pid for worker in live)
        held = {worker.rank: self._read_memory(worker) for worker in live}
        if held and (shortage := self._memory.read(held, now)) is not None:
            self._report(shortage)

    def _read_memory(self, worker: WorkerProcess) -> int:
        held = worker.memory_bytes()
        self._peak_bytes[worker.rank] = max(held, self._peak_bytes.get(worker.rank, 0))
        return held

    def _reap(self) -> None:
        known = {worker.child: worker for worker in self._workers if worker.live}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                # A rank may have been started again since, at the report of an exit before this one.
                worker = known.get(pid) or next((one for one in self._workers if one.live and one.child == pid), None)
                if worker is not None:
                    self._on_exit(worker, os.waitstatus_to_exitcode(status))

    def _on_exit(self, worker: WorkerProcess, status: int) -> None:
        worker.status = status
        self._on_channel(worker)  # its last messages come before its exit
        status = worker.set_status_of_rank()
        self._loop.remove_reader(worker.pipes.channel.fileno())
        self._pipes.finish(worker.rank)
        crashed = status < 0 and status != -signal.SIGKILL
        oom = self._oom.explain(worker.pid) if status == -signal.SIGKILL and not worker.killed else ""
        if oom and (figures := self._memory.describe_last(worker.rank)):
            oom += f"; a moment before, {figures}"
        crash_dump = worker.read_new_stacks() if crashed else ""
        # The program has redirected the fault handler to stderr, like absl.
        if crashed and FATAL_ERROR not in crash_dump:
            crash_dump = self._output.logs.crash_dump(worker.rank) or crash_dump
        self._report_flight(worker)
        tail = self._output.logs.stderr_tail(worker.rank)
        peak = self._peak_bytes.pop(worker.rank, 0)
        self._report_replies()  # the head may start the rank again as soon as it knows of the end
        self._report(WorkerExited(worker.rank, status, crash_dump, tail, oom, peak))
