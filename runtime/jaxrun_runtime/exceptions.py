"""The exceptions of this package. They have their own file so that the package and its functions can import them."""


class DivergenceError(RuntimeError):
    """Raised with --lockstep strict before the processes make different cross-process calls; says how they differ."""


class SnapshotError(TypeError, ValueError):
    """Raised by snapshot and restore for arguments that they cannot keep or use. The text names every wrong leaf.

    All ranks raise it together. jaxrun does not restart the job after it, because the next attempt would fail, too.
    """


for _error in (DivergenceError, SnapshotError):
    _error.__module__ = __package__  # the public name, which tracebacks show


class SpentOrderError(BaseException):
    """The program needs connections on CPU that can never be made again, since a rank came back (--keep-survivors).

    It derives from BaseException because a program that repeats its step after each Exception would do so for ever.
    """
