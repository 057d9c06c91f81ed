"""Start JAX processes, keep them in step, and say what went wrong: the launcher's side, which never imports jax."""

__version__ = "0.1.0"

RUNTIME = "jaxrun_runtime"  # the package that runs in every worker; the launcher only names it
