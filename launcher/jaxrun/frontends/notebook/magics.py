"""%gang and %%gang for IPython: the notebook's gang is its variable `gang`.

%load_ext jaxrun
%gang -n 4 -d 2         start such a gang, in place of another one;  %gang: its state;  %gang stop;  %gang restart
%gang -H h1:4,h2:4      start it on these hosts, by mpirun or ssh
%gang --platform cuda   start one process for each GPU
%%gang --timeout 60     run this cell on all ranks, each in one namespace that lasts;  --rank 0,2-3: on these only
gang["x"]               the value of x on each rank;  gang["x"] = value  gives all ranks the value

%gang takes -n, -d, -N/--hosts, --backend, --platform, --env NAME=VALUE, and any other option of jaxrun. A cell may have
magics, !commands and await, which are the ranks' own.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from jaxrun.errors import JaxrunError, UsageError
from jaxrun.frontends.gang.call import GangCall, check_timeout
from jaxrun.frontends.gang.gang import Gang, ensure_usable, is_ready
from jaxrun.frontends.gang.gang_errors import CallTimeout, GangError, RemoteError, WorkerDied
from jaxrun.frontends.gang.gang_job import check_start
from jaxrun.frontends.gang.ipython import cell_name, publish, to_python
from jaxrun.frontends.gang.notebook_display import MimeBundle, format_failures, merge_by_rank
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.frontends.notebook.arguments import HELP, MagicArguments, parse_arguments
from jaxrun.frontends.notebook.completion import add_matcher, remove_matcher
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.payload import FunctionReference
from jaxrun.text import format_ranks, format_seconds

NAME = "gang"  # of the magic and of the variable
_NO_GANG = f"there is no gang; to start one of 4 processes, type: %{NAME} -n 4"
_SHOWN_NAMES = 10  # of variables that are lost
_SILENCED = "_ipython_magic_output_can_be_silenced"  # IPython's attribute of a magic: a semicolon hides the result


class CellResult(Struct, frozen=True):
    """The value of a cell's last expression on the ranks, as a display."""

    bundle: MimeBundle

    def _repr_mimebundle_(self, **kwargs: Any) -> MimeBundle:
        return self.bundle


def load(shell: Any) -> None:
    """Register the magics with IPython's `shell`."""

    def gang(line: str, cell: str | None = None) -> CellResult | None:
        try:
            if cell is not None:
                return _run_cell(shell, parse_arguments(line), cell)
            _run_line(shell, parse_arguments(line))
            return None
        except JaxrunError as error:
            if isinstance(error, RemoteError):
                raise
            lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            if cell is None and (present := _find_gang(shell)) is not None:
                lines.append(f"the gang is still the one that was there: {present}")
            raise _with_text(error, "\n".join(lines)) from None

    gang.__doc__ = __doc__
    setattr(gang, _SILENCED, True)
    shell.register_magic_function(gang, "line_cell", NAME)
    add_matcher(shell, lambda: _find_gang(shell))


def unload(shell: Any) -> None:
    for magics in shell.magics_manager.magics.values():
        magics.pop(NAME, None)
    remove_matcher(shell)
    if _stop(shell):
        print("jaxrun: the gang has ended")


def _run_line(shell: Any, arguments: MagicArguments) -> None:
    if arguments.timeout is not None:
        raise UsageError(f"--timeout is for a cell: %%{NAME} --timeout {arguments.timeout:g}")
    if arguments.ranks:
        raise UsageError(f"--rank is for a cell: %%{NAME} --rank {arguments.ranks[0].start}")
    if arguments.action == HELP:
        print(__doc__)
        return
    gang = _find_gang(shell)
    if arguments.gang and (gang is None or gang.spec != GangSpec(**arguments.gang)):
        _start(shell, arguments.gang)
    elif arguments.action == "stop":
        print("jaxrun: the gang has ended" if _stop(shell) else "jaxrun: there is no gang")
    elif arguments.action == "restart" and gang is not None:
        began = time.monotonic()
        gang.restart()
        took = format_seconds(time.monotonic() - began)
        print(f"jaxrun: {gang}, started again in {took}")
    elif gang is None:
        print(f"jaxrun: {_NO_GANG}")
    else:
        print(f"jaxrun: {_describe_state(gang)}")


def _run_cell(shell: Any, arguments: MagicArguments, cell: str) -> CellResult | None:
    if arguments.action == HELP:
        print(__doc__)
        return None
    if arguments.action:
        raise UsageError(f"%%{NAME} runs a cell; to {arguments.action} the gang: %{NAME} {arguments.action}")
    check_timeout(arguments.timeout)
    gang = _find_gang(shell)
    if arguments.gang and (gang is None or gang.spec != GangSpec(**arguments.gang)):
        if gang is not None and (lost := _describe_lost(gang)):
            raise UsageError(
                f"this cell would replace the gang that runs ({gang}), and its variables would be lost: {lost}. To run "
                f"the cell on it, leave the options out; to replace it, type them after %{NAME}, on a line of its own"
            )
        gang = _start(shell, arguments.gang)
    if gang is None:
        raise UsageError(_NO_GANG)
    ensure_usable(gang)
    ranks = _select_ranks(gang, arguments.ranks)
    # An empty line first, so that line numbers count the line of the magic.
    code, source = "\n" + to_python(shell, cell), "\n" + cell
    run_cell = FunctionReference(f"{RUNTIME}.gang.notebook_cells", "run_cell")
    call = gang.start_call(run_cell, code, _running_cell_name(shell), source, ranks)
    call.main_rank = ranks[0]
    raised: BaseException
    try:
        with call:
            outputs = {rank: output for rank, output in enumerate(call.results(arguments.timeout)) if rank in ranks}
        for display in outputs[ranks[0]].displays:
            publish(shell, display)
        shown = merge_by_rank({rank: output.result for rank, output in outputs.items()})
        return CellResult(shown) if shown else None
    except (WorkerDied, CallTimeout):
        raise
    except KeyboardInterrupt as error:
        raised = _with_text(error, "KeyboardInterrupt")
    except BaseException as error:
        raised = error
    if call.failures:
        raised = _merge_failures(raised, call)
    raise raised  # outside the except clause, where IPython would render an exception group in its own way


def _select_ranks(gang: Gang, wanted: Sequence[range]) -> list[int]:
    """The ranks that are wanted, or all, in order. Raises UsageError for one that the gang has not."""
    every = range(gang.processes)
    for part in wanted:
        if part[-1] not in every:
            raise UsageError(f"--rank: this gang has {format_ranks(every)}, and no rank {part[-1]}")
    return sorted({rank for part in wanted for rank in part}) or list(every)


def _merge_failures(error: BaseException, call: GangCall) -> BaseException:
    """The exception of a cell in which ranks have failed: the first one, which names the others."""
    # A rank that was interrupted because another has failed has no error of its own.
    follows = () if isinstance(error, KeyboardInterrupt) else call.interrupted
    failures = [one for one in call.failures if one.rank not in follows or one.error != "KeyboardInterrupt"]
    if isinstance(error, BaseExceptionGroup) and not hasattr(error, "rank"):
        error = error.exceptions[0]
    size = len({*call.outcomes, *call.running, *call.disconnected})
    if isinstance(error, (SyntaxError, BaseExceptionGroup)):  # IPython ignores _render_traceback_ of these
        error = RemoteError(failures[0].headline)
    further = "\n".join(filter(None, (call.waiting, call.lost_state)))
    return _with_text(error, format_failures(failures, size, further))


def _with_text(error: BaseException, text: str) -> BaseException:
    """`error`, made to be shown by IPython as `text`."""
    error._render_traceback_ = lambda: text.splitlines()  # type: ignore[attr-defined]
    return error


def _running_cell_name(shell: Any) -> str:
    """`In[3]`, from the code that calls this: whether execution_count has been raised depends on IPython's version."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if name := cell_name(shell, frame.f_code.co_filename):
            return name
    return "cell"


def _find_gang(shell: Any) -> Gang | None:
    """Return the notebook's gang; None if there is none, or if it is closed, for example after a `with gang`."""
    found = shell.user_ns.get(NAME)
    return found if isinstance(found, Gang) and not found.closed else None


def _describe_state(gang: Gang) -> str:
    if not gang.healthy:
        return f"a {gang.spec}, which starts again when you next use it"
    pids = ", ".join(str(worker.pid) for worker in gang.workers)
    return f"{gang}; process ids {pids}"


def _start(shell: Any, arguments: Mapping[str, Any]) -> Gang:
    """Start a gang in place of the notebook's present one, which ends once the new one has started.

    A gang with GPUs ends first, because the new one needs them, but only after the new one's arguments are checked.
    """
    present = shell.user_ns.get(NAME)
    if NAME in shell.user_ns and not isinstance(present, Gang):
        kind = type(present).__name__
        raise UsageError(f"{NAME} is a variable of yours, of type {kind}; del {NAME}, or rename it: %{NAME} needs it")
    began = time.monotonic()
    if present is not None and _holds_devices(present):
        check_start(GangSpec(**arguments))
        _end_replaced(shell)
    gang = Gang(**arguments)
    _end_replaced(shell)
    shell.user_ns[NAME] = gang
    print(f"jaxrun: {gang}, started in {format_seconds(time.monotonic() - began)}")
    return gang


def _end_replaced(shell: Any) -> None:
    """Close the notebook's gang, if there is one, because another takes its place; says what is lost with it."""
    gang = _find_gang(shell)
    if gang is not None and (lost := _describe_lost(gang)):
        print(f"jaxrun: the gang before this one ({gang}) ends, and its variables are lost: {lost}")
    _stop(shell)


def _describe_lost(gang: Gang) -> str:
    """Name the variables that end with the gang; empty if there are none."""
    if not gang.healthy:
        return ""
    if not is_ready(gang):
        return "all"
    list_variables = FunctionReference(f"{RUNTIME}.gang.notebook_cells", "list_variables")
    names = sorted(set().union(*gang.run(list_variables)))
    if not names:
        return ""
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown}, …" if len(names) > _SHOWN_NAMES else shown


def _holds_devices(gang: Gang) -> bool:
    """Whether the gang has devices that no other can have beside it."""
    with contextlib.suppress(GangError):  # it is stopped
        return gang.workers[0].platform != "cpu"
    return False


def _stop(shell: Any) -> bool:
    """Close the notebook's gang. Returns whether there was one."""
    gang = _find_gang(shell)
    if gang is None:
        return False
    gang.close()
    del shell.user_ns[NAME]
    return True
