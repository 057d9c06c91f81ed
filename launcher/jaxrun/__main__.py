"""`jaxrun`, also as `python -m jaxrun`: begins and ends the launcher's own process."""

try:  # before anything is imported from a file, as Python drops a KeyboardInterrupt in a callback of its importer
    import _signal as signal  # type: ignore[import-not-found]
    import os
    import sys

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as after a shell's `&`
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the commands handle it
except KeyboardInterrupt:
    raise SystemExit(130) from None

TYPE_CHECKING = False  # typing itself, and contextlib, are imported when Ctrl-C is taken care of
if TYPE_CHECKING:
    from typing import NoReturn

_NEEDED_FILES = ("/dev/null", "/proc/self/stat")  # which some containers lack


def entry() -> "NoReturn":
    """The installed command."""
    for path in _NEEDED_FILES:
        if not os.path.exists(path):
            _refuse(f"{path} is not there, without which no process can be started and watched; mount /dev and /proc")
    try:
        _start()
    except OSError as error:
        from jaxrun.errors import describe_shortage

        text = describe_shortage(error)
        if not text:
            raise
        _refuse(text)


def _refuse(text: str) -> "NoReturn":
    from jaxrun.errors import EXIT_UNAVAILABLE

    print(f"jaxrun: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_UNAVAILABLE)


def _start() -> "NoReturn":
    """Start the fork server before the command line is read and click is imported."""
    import contextlib

    from jaxrun.node import early_signals
    from jaxrun.node.forkserver import prestart
    from jaxrun.node.forkserver.client import open_standard_descriptors
    from jaxrun.protocol.names import CONTROL_FD

    early_signals.clear_mask()
    open_standard_descriptors()
    _replace_closed_streams()
    with contextlib.suppress(KeyError, ValueError, OSError):  # not for our children; a wrong value is reported later
        os.set_inheritable(int(os.environ[CONTROL_FD]), False)
    prestarted = prestart.start(sys.argv[1:], os.environ)
    from jaxrun.msgspec_import import import_msgspec

    import_msgspec()
    from jaxrun.cli.main import run_and_exit

    run_and_exit(sys.argv[1:], prestarted)


def _replace_closed_streams() -> None:
    """Where the caller has closed one of 0, 1 and 2, Python has no stream for it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - until the end


if __name__ == "__main__":
    entry()
