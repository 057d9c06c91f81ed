"""What functions of this package raise, in a file of its own: the package imports the functions, and they these."""


class DivergenceError(RuntimeError):
    """With --lockstep strict: the processes would make different cross-process calls. The text says how they differ."""


class SnapshotError(TypeError, ValueError):
    """snapshot or restore was called with something that it cannot keep or use. The text names every leaf.

    All ranks raise it alike, and jaxrun does not start the job again after it: the next attempt would do the same.
    """


for _error in (DivergenceError, SnapshotError):
    _error.__module__ = __package__  # where people find it, and the name that a traceback shows
