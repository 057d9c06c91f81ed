"""What lets a rank on a GPU give up a collective call whose other ranks have died (--keep-survivors).

The variables are those of JAX's page on fault tolerance (https://docs.jax.dev/en/latest/fault_tolerance.html). Without
them XLA ends the process at an error of NCCL, or waits for ever. They were not tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

_XLA_FLAGS = "XLA_FLAGS"
_FLAGS = {
    "--xla_gpu_nccl_terminate_on_error": "false",
    "--xla_gpu_nccl_async_execution": "true",
    "--xla_gpu_nccl_blocking_communicators": "false",
}
_VARIABLES = {
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1",
}


def variables_for_survivors(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set before JAX makes its backend; what the user has set stays. Empty on other platforms.

    environ:  the rank's, with the platform that jaxrun has chosen
    """
    if environ.get("JAX_PLATFORMS", "").split(",")[0].strip() != "cuda":
        return {}
    given = environ.get(_XLA_FLAGS, "")
    named = {word.partition("=")[0] for word in given.split()}
    flags = [f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in named]
    set_flags = {_XLA_FLAGS: " ".join(filter(None, (given, *flags)))} if flags else {}
    return {**set_flags, **{name: value for name, value in _VARIABLES.items() if name not in environ}}
