"""The variables by which programs show colours although their output goes to a pipe: jaxrun's, to the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.spec.job.job import Job
from jaxrun.terminal import TerminalFormat

# Known to Python itself (3.13), pytest, rich and many others, and inherited by what a rank starts. rich would also
# move the cursor to animate its progress bars, which lines of other ranks would tear apart.
_VARIABLES = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0"}
_CHOICES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PY_COLORS", "PYTHON_COLORS", "CLICOLOR_FORCE")


def colour_variables(job: Job, environ: Mapping[str, str], fds: tuple[int, int] = (1, 2)) -> dict[str, str]:
    """Return the variables for the ranks, if all that they print appears on a terminal that shows colours.

    Return none if the user has chosen: by a variable that is set to something, or by TERM=dumb.

    fds:  where standard output and standard error of the ranks appear
    """
    given = {**environ, **job.env}
    is_chosen = any(given.get(name) for name in _CHOICES)
    if job.live or is_chosen or not all(TerminalFormat.at(fd, given).colour for fd in fds):
        return {}
    return {name: value for name, value in _VARIABLES.items() if not given.get(name)}
