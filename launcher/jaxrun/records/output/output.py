"""Writes the workers' output to the log files and, with prefixes, to the screen, and jaxrun's own lines in between.

One thread uses an `Output`; nothing here blocks it except the log files' disk. This module decides when text is shown,
line_buffer and screen how it looks; spool delivers it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from jaxrun.records.output.rank_logs import STREAMS, RankLogs
from jaxrun.records.output.repeated_lines import RepeatedLines
from jaxrun.records.output.repeated_usage import RepeatedUsage, shared_prefix
from jaxrun.records.output.screen import HeldScreen, RankStream, Screen, rank_prefix
from jaxrun.terminal import TerminalFormat, terminal_width

PARTIAL_LINE_DELAY_S = 3.0  # before an unfinished line is shown, so that one that is written in pieces stays one line
LAST_LINE_DELAY_S = 0.05  # the same of ranks whose program has ended
PROGRESS_BAR_INTERVAL_S = 3.0  # between two states of an unfinished progress bar
MAX_PARTIAL_BYTES = 2**16  # of an unfinished line that is held back
CONGESTED_POLL_S = 0.05
HELD_POLL_S = 0.2  # between two checks whether the terminal's holder has ended
STATUS_INTERVAL_S = 10.0  # between two status lines where there is no terminal


class Output:
    """The OutputSink on the launcher's host: the workers' bytes on screen and in files, and jaxrun's own lines."""

    def __init__(
        self,
        size: int,
        *,
        log_dir: Path | None,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        colour: tuple[bool, bool] = (False, False),
        shown: frozenset[int] | None = None,
        open_logs: bool = True,
        clock: Callable[[], float] = time.monotonic,
        held: HeldScreen | None = None,
        quiet: bool = False,
        prompting: int | None = 0,
        grouped: Collection[str] = (),
        names_hosts: bool = False,
    ) -> None:
        """
        log_dir:    an existing directory for rank-0003.out, rank-0003.err and so on; None keeps no files
        colour:     whether stdout, stderr are terminals that want colours
        shown:      the ranks that the screen shows; None for all
        open_logs:  open all log files now, and not only when they are written to
        held:       the terminal, if another process has it: nothing is shown until that process ends
        quiet:      show no dim text and no status
        prompting:  the rank that may be at a prompt, since somebody may type what it reads; None if there is none
        grouped:    the streams of which a line that several ranks print at about the same time is shown once, with its
                    ranks
        names_hosts:  prefixes have the ranks' hosts, which `set_hosts` tells
        """
        self._quiet = quiet
        self._clock = clock
        self._held = held
        self._ended: set[int] = set()  # ranks whose program has ended
        self._prompting = prompting
        self._waiting: dict[RankStream, float] = {}  # since when a stream has had text that is not shown yet
        out = Screen(stdout_fd, "stdout", colour=colour[0])
        same = _same_file(stdout_fd, stderr_fd)
        self._err = out if same else Screen(stderr_fd, "stderr", colour=colour[1])
        self._screens = (out,) if same else (out, self._err)
        self._debugger_screen = out if os.isatty(stdout_fd) else self._err
        self._streams = {
            (rank, stream): RankStream(screen, rank_prefix(rank, size, colour=screen.colour), rank=rank)
            for rank in (range(size) if shown is None else sorted(shown))
            for stream, screen in zip(STREAMS, (out, self._err), strict=True)
        }
        self._size = size
        self._hosts: Callable[[], Mapping[int, str]] | None = dict if names_hosts else None
        self._named: set[RankStream] = set()  # whose prefixes have their hosts
        self._grouped = grouped
        self._repeated = RepeatedLines() if grouped and len(self._streams) > len(STREAMS) else None
        self._usage = RepeatedUsage()
        self._stderr_fd = stderr_fd
        self._status_printed_at = float("-inf")
        self._ranks_to_open = range(size) if open_logs else ()
        self.logs = RankLogs(log_dir, self._ranks_to_open, self.print_line)

    def set_hosts(self, hosts: Callable[[], Mapping[int, str]]) -> None:
        """Name the hosts in the prefixes from now on, if that is wanted; `hosts` returns those that are known."""
        if self._hosts is not None:
            self._hosts = hosts
            self._named.clear()

    def note_end(self, rank: int) -> None:
        """Show what this rank writes soon, even without a newline: its program has ended, and the others go on."""
        self._ended.add(rank)

    def show_prompt(self, rank: int) -> None:
        """Show the line that this rank has begun, as far as it has: it may wait for what a person types."""
        if rank != self._prompting or self._held is not None:
            return
        for stream in STREAMS:
            rank_stream = self._streams.get((rank, stream))
            if rank_stream is not None and rank_stream.buffer.has_partial:
                self._show_partial(rank_stream)

    def begin_attempt(self, log_dir: Path | None) -> None:
        """Show the last lines of the ranks that have ended, and keep the logs of the next attempt in `log_dir`."""
        for rank, stream in self._streams:
            self.end_stream(rank, stream)
        self._show_held()
        self._ended.clear()
        self._usage = RepeatedUsage()
        self.logs.close()
        self.logs = RankLogs(log_dir, self._ranks_to_open, self.print_line)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Log and show bytes that were just read from the worker's "out" or "err"."""
        self.logs.write(rank, stream, data)
        self.show(rank, stream, data)

    def show(self, rank: int, stream: str, data: bytes) -> None:
        """Show output on the screen that the worker's agent has logged elsewhere."""
        rank_stream = self._streams.get((rank, stream))
        if rank_stream is None or self._held is not None:
            return
        if self._hosts is not None and rank_stream not in self._named:
            self._name_host(rank, rank_stream)
        continues = rank_stream.buffer.line_started
        whole = rank_stream.buffer.feed(data)
        if whole:
            self._show_lines(rank, stream, whole, continues=continues)
        if not rank_stream.buffer.pending:
            self._waiting.pop(rank_stream, None)
        elif len(rank_stream.buffer.pending) > MAX_PARTIAL_BYTES:
            self._show_partial(rank_stream)
        elif whole or rank_stream not in self._waiting:
            self._waiting[rank_stream] = self._clock()

    def end_stream(self, rank: int, stream: str) -> None:
        """Show the last line of a stream that has ended, with a newline if it lacks one."""
        rank_stream = self._streams.get((rank, stream))
        if rank_stream is not None and self._held is None:
            self._waiting.pop(rank_stream, None)
            continues = rank_stream.buffer.line_started
            self._show_lines(rank, stream, rank_stream.buffer.finish(), continues=continues)

    def _show_lines(self, rank: int, stream: str, lines: bytes, *, continues: bool) -> None:
        """Show whole lines, unless they wait for the same lines of other ranks.

        continues:  the beginning of the first line was shown already
        """
        now = self._clock()
        if self._usage.hold(rank, stream, lines, now):
            return
        if self._repeated is not None and lines:
            if stream in self._grouped and not continues and self._repeated.hold(rank, stream, lines, now):
                return
            self._show_repeated()
        self._streams[rank, stream].show(lines)

    def _name_host(self, rank: int, stream: RankStream) -> None:
        host = self._hosts().get(rank, "") if self._hosts is not None else ""
        if host:
            self._named.add(stream)
            stream.prefix = rank_prefix(rank, self._size, colour=stream.screen.colour, host=host)

    def flush_due(self) -> float | None:
        """Show text that has waited long enough; returns the seconds until the next call, None if nothing waits."""
        self._report_lost_screens()
        now = self._clock()
        wait = CONGESTED_POLL_S if self.congested else float("inf")
        if self._held is not None:
            wait = HELD_POLL_S
            if self._held.is_free():
                self._release()
        repeated_due = self._repeated.due if self._repeated is not None else None
        if repeated_due is not None or self._usage.due is not None:
            for due, show in ((self._usage.due, self._show_held), (repeated_due, self._show_repeated)):
                if due is not None and due <= now:
                    show()
                elif due is not None:
                    wait = min(wait, due - now)
        for rank_stream, since in list(self._waiting.items()):
            has_ended = rank_stream.rank in self._ended
            due = since + (LAST_LINE_DELAY_S if has_ended else PARTIAL_LINE_DELAY_S)
            if rank_stream.buffer.is_progress_bar:
                due = max(due, rank_stream.bar_shown_at + PROGRESS_BAR_INTERVAL_S)
            if not rank_stream.buffer.has_partial:
                del self._waiting[rank_stream]
            elif due <= now:
                self._show_partial(rank_stream)
            else:
                wait = min(wait, due - now)
        return None if wait == float("inf") else wait

    def show_debugger(self, text: str) -> None:
        """Show a debugger's text at once and without a prefix, because it may be a prompt."""
        self._show_held()
        self._debugger_screen.write(
            self._debugger_screen.interleaver.render(self, b"", text.encode(errors="backslashreplace"))
        )

    def end_debugger_line(self) -> None:
        """Note that typed input has ended the debugger's line."""
        self._debugger_screen.interleaver.release(self)

    @property
    def terminal(self) -> TerminalFormat:
        """The terminal format for jaxrun's own text."""
        return TerminalFormat(terminal_width(self._stderr_fd), self._err.colour)

    def print_line(self, text: str, *, status: bool = False, dim: bool = False) -> None:
        """Write jaxrun's own text to stderr, in lines of its own, wrapped on a terminal.

        status:  on a terminal the text is shown until the next line, elsewhere now and then; an empty text ends that
        dim:     the text is of little importance
        """
        if self._quiet and (status or dim):
            return
        terminal = self.terminal
        if status:
            self._print_status(text, terminal)
            return
        text = terminal.rewrap(text.removesuffix("\n"))
        self.print_text(terminal.dim(text) if dim else text)

    def print_text(self, text: str) -> None:
        """Write jaxrun's own text to stderr unchanged, in lines of its own."""
        if not text.endswith("\n"):
            text += "\n"
        if self._held is not None:
            self._held.kept.append(text)
            return
        self._show_held()
        self._err.write(self._err.interleaver.interrupt() + text.encode(errors="backslashreplace"))

    def _release(self) -> None:
        """Print the text that was kept while another process had the terminal."""
        held, self._held = self._held, None
        for text in held.kept if held is not None else ():
            self.print_text(text)

    def _print_status(self, text: str, terminal: TerminalFormat) -> None:
        if self._held is not None:
            return
        if terminal.width is not None:
            shown = terminal.dim(text[: terminal.width - 1])
            self._err.write(self._err.interleaver.show_status(shown.encode(errors="backslashreplace")))
        elif text and self._clock() >= self._status_printed_at + STATUS_INTERVAL_S:
            self._status_printed_at = self._clock()
            self.print_text(text)

    @property
    def congested(self) -> bool:
        """Whether the screen accepts no more and no more can be stored for it: then the workers must not be read."""
        return any(screen.spool.full for screen in self._screens)

    def close(self, timeout: float | None = None) -> bool:
        """Wait until everything was delivered or its reader has gone; returns False after `timeout` seconds.

        May be called again, also after a signal handler has raised out of it.
        """
        if self._held is not None:
            if not self._held.wait_until_free(timeout):
                return False
            self._release()
        for rank, stream in self._streams:
            self.end_stream(rank, stream)
        self._show_held()
        self.logs.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        done = True
        for screen in self._screens:  # stderr last: it may have to report what happened to stdout
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done = screen.spool.close(left) and done
            self._report_lost_screens()
        return done

    def _show_held(self) -> None:
        """Show lines that were held for others that are the same, and usage errors, each once."""
        self._show_repeated()
        for ranks, stream, text in self._usage.release():
            self._show_shared(ranks, stream, text)

    def _show_repeated(self) -> None:
        for ranks, (stream, text) in (
            self._repeated.release() if self._repeated is not None and self._repeated.due else ()
        ):
            self._show_shared(ranks, stream, text)

    def _show_shared(self, ranks: list[int], stream: str, text: bytes) -> None:
        rank_stream = self._streams[ranks[0], stream]
        if len(ranks) > 1:
            rank_stream = RankStream(rank_stream.screen, shared_prefix(ranks))
        rank_stream.show(text)

    def _show_partial(self, rank_stream: RankStream) -> None:
        self._show_held()
        self._waiting.pop(rank_stream, None)
        if rank_stream.buffer.is_progress_bar:
            rank_stream.bar_shown_at = self._clock()
        rank_stream.show(rank_stream.buffer.flush_partial())

    def _report_lost_screens(self) -> None:
        for screen in self._screens:
            loss = screen.new_loss()
            if loss:
                rest = "is only in the log files" if self.logs.has_files else "is dropped"
                self.print_line(f"jaxrun: {loss}; the workers' output from here on {rest}, the job continues")


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
