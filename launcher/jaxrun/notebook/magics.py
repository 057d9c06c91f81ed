"""%gang and %%gang for IPython: the notebook's gang is its variable `gang`.

%load_ext jaxrun
%gang -n 4 -d 2         start it so, or another if it is not so;  %gang: what there is;  %gang stop;  %gang restart
%%gang --timeout 60     run this cell on all ranks, each in one namespace that lasts
gang["x"]               what x is there, by rank;  gang["x"] = value  gives all ranks the value
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, fields
from typing import Any

from jaxrun import RUNTIME
from jaxrun.api import Gang
from jaxrun.errors import JaxrunError, UsageError
from jaxrun.gang.call import GangCall
from jaxrun.gang.exceptions import CallTimeout, RemoteError, WorkerDied
from jaxrun.gang.gang import remote_function
from jaxrun.gang.instance import describe_gang
from jaxrun.gang.spec import GangSpec
from jaxrun.notebook import errors
from jaxrun.notebook.arguments import MagicArguments, parse_arguments
from jaxrun.notebook.display import publish
from jaxrun.notebook.transcript import MimeBundle, merge_by_rank
from jaxrun.text import format_seconds

NAME = "gang"  # of the magic, and of the variable
_WAITING = " did not return: "  # of the note for ranks that others have waited for
_SILENCED = "_ipython_magic_output_can_be_silenced"  # by a semicolon, as IPython marks what can be


@dataclass(frozen=True, slots=True)
class CellResult:
    """The last expression of a cell, as the ranks have shown it."""

    bundle: MimeBundle

    def _repr_mimebundle_(self, **kwargs: Any) -> MimeBundle:
        return self.bundle


def load(shell: Any) -> None:
    """Let IPython's `shell` know the magic."""

    def gang(line: str, cell: str | None = None) -> CellResult | None:
        try:
            asked = parse_arguments(line)
            if cell is not None:
                return _run(shell, asked, cell)
            _command(shell, asked)
            return None
        except JaxrunError as error:
            if isinstance(error, RemoteError):
                raise
            raise _with_text(error, f"{type(error).__name__}: {error}") from None

    gang.__doc__ = __doc__
    setattr(gang, _SILENCED, True)
    shell.register_magic_function(gang, "line_cell", NAME)


def unload(shell: Any) -> None:
    """Forget the magic, and end the gang."""
    for known in shell.magics_manager.magics.values():
        known.pop(NAME, None)
    _stop(shell)


def _command(shell: Any, asked: MagicArguments) -> None:
    if asked.timeout is not None:
        raise UsageError(f"--timeout is for a cell: %%{NAME} --timeout {asked.timeout:g}")
    gang = _find_gang(shell)
    if asked.shape is not None:
        if gang is not None and gang.spec == asked.shape:
            print(f"jaxrun: {_state(gang)}")
        else:
            _start(shell, asked.shape)
    elif asked.action == "stop":
        print("jaxrun: the gang has ended" if _stop(shell) else "jaxrun: there is no gang")
    elif asked.action == "restart" and gang is not None:
        began = time.monotonic()
        gang.restart()
        took = format_seconds(time.monotonic() - began)
        print(f"jaxrun: {describe_gang(gang.spec, gang.workers)}, started anew in {took}")
    elif gang is None:
        print(f"jaxrun: there is no gang; %{NAME} -n 4 starts one of 4 processes")
    else:
        print(f"jaxrun: {_state(gang)}")


def _run(shell: Any, asked: MagicArguments, cell: str) -> CellResult | None:
    if asked.action:
        raise UsageError(f"%%{NAME} runs a cell; to {asked.action} the gang: %{NAME} {asked.action}")
    gang = _find_gang(shell)
    if gang is None or asked.shape not in (None, gang.spec):
        gang = _start(shell, asked.shape or GangSpec())
    code = "\n" + cell  # the magic's own line counts
    talk = gang.start_call(remote_function(f"{RUNTIME}.notebook_cells", "run"), code, _name(shell))
    raised: BaseException
    try:
        with talk:
            shown = merge_by_rank(dict(enumerate(gang.collect_results(talk, asked.timeout))))
        return CellResult(shown) if shown else None
    except (WorkerDied, CallTimeout):
        raise
    except KeyboardInterrupt as error:
        raised = _with_text(error, "KeyboardInterrupt")
    except BaseException as error:
        raised = error
    if talk.failures:
        raised = _merge_failures(shell, raised, talk)
    raise raised  # not within the except, or IPython would show its own idea of an exception group


def _merge_failures(shell: Any, error: BaseException, talk: GangCall) -> BaseException:
    """What the cell raises where ranks have failed; errors other than the first are shown, folded."""
    # Ranks that were interrupted because others have failed did nothing wrong.
    failures = [f for f in talk.failures if isinstance(error, KeyboardInterrupt) or f.error != "KeyboardInterrupt"]
    for bundle in errors.fold_other_errors(failures):
        publish(shell, bundle)
    waiting = [note for note in getattr(error, "__notes__", ())[-1:] if _WAITING in note]
    if isinstance(error, BaseExceptionGroup) and not hasattr(error, "rank"):
        error = error.exceptions[0]
    size = len({*talk.outcomes, *talk.running, *talk.disconnected})
    if isinstance(error, (SyntaxError, BaseExceptionGroup)):  # which IPython shows in ways of its own
        error = RemoteError(f"{type(error).__name__}: {error}")
    return _with_text(error, errors.format_main_error(failures, size, waiting))


def _with_text(error: BaseException, text: str) -> BaseException:
    """`error`, which IPython shows as `text`."""
    error._render_traceback_ = lambda: text.splitlines()  # type: ignore[attr-defined]
    return error


def _name(shell: Any) -> str:
    """Of the cell that runs: `In[3]`."""
    frame = sys._getframe()
    # IPython has counted on or not, according to its version; it knows in any case whose code this is.
    while frame.f_back is not None:
        frame = frame.f_back
        if named := shell.compile.format_code_name(frame.f_code.co_filename):
            return str(named[1])
    return "cell"


def _find_gang(shell: Any) -> Gang | None:
    found = shell.user_ns.get(NAME)
    return found if isinstance(found, Gang) else None


def _state(gang: Gang) -> str:
    if not gang.healthy:
        return f"a {gang.spec}, which is started anew when it is used next"
    return (
        f"{describe_gang(gang.spec, gang.workers)}; process ids {', '.join(str(worker.pid) for worker in gang.workers)}"
    )


def _start(shell: Any, shape: GangSpec) -> Gang:
    """A gang in the place of the notebook's, if that has one."""
    if _find_gang(shell) is None and NAME in shell.user_ns:
        kind = type(shell.user_ns[NAME]).__name__
        raise UsageError(f"{NAME} is a variable of yours, of type {kind}; del {NAME}, or rename it: %{NAME} needs it")
    _stop(shell)
    began = time.monotonic()
    given = {field.name: getattr(shape, field.name) for field in fields(shape)}
    gang = shell.user_ns[NAME] = Gang(**given)
    print(f"jaxrun: {describe_gang(gang.spec, gang.workers)}, started in {format_seconds(time.monotonic() - began)}")
    return gang


def _stop(shell: Any) -> bool:
    """End the notebook's gang; whether there was one."""
    gang = _find_gang(shell)
    if gang is None:
        return False
    gang.close()
    del shell.user_ns[NAME]
    return True
