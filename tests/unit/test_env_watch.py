"""What is said of variables that a program sets too late for JAX, and where it has set them."""

import sysconfig
from types import SimpleNamespace

import pytest

from jaxrun_runtime import env_watch
from jaxrun_runtime.env_watch import say_instead

_PACKAGES = sysconfig.get_paths()["purelib"]
_COUNT = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("name", "value", "before", "platform", "instead"),
    [
        ("XLA_FLAGS", f"{_COUNT}=8", "", "cpu", "-d 8"),
        ("XLA_FLAGS", f"{_COUNT}=2", "", "cpu", ""),  # as many as there are
        ("XLA_FLAGS", f"{_COUNT}=8", "", "gpu", ""),
        ("XLA_FLAGS", "--xla_a=1 --xla_b", "--xla_b", "cpu", "--env 'XLA_FLAGS=--xla_a=1 --xla_b'"),
        ("XLA_FLAGS", f"--xla_a {_COUNT}=8", "", "cpu", "-d 8 --env XLA_FLAGS=--xla_a"),
        ("XLA_FLAGS", "--xla_b", "--xla_a --xla_b", "cpu", ""),
        ("XLA_FLAGS", "--xla_gpu_a=1", "", "cpu", ""),
        ("XLA_FLAGS", "--xla_gpu_a=1", "", "gpu", "--env XLA_FLAGS=--xla_gpu_a=1"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "", "cpu", ""),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "", "gpu", "--env XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "false", "gpu", ""),
        ("CUDA_VISIBLE_DEVICES", "0", "", "gpu", "--env CUDA_VISIBLE_DEVICES=0"),
        ("LIBTPU_INIT_ARGS", "--a", "", "tpu", "--env LIBTPU_INIT_ARGS=--a"),
        ("JAX_NUM_CPU_DEVICES", "8", "", "cpu", "-d 8"),
        ("JAX_NUM_CPU_DEVICES", "2", "", "cpu", ""),
        ("JAX_PLATFORMS", "cpu", "", "cpu", ""),
        ("JAX_PLATFORMS", "cuda,cpu", "", "gpu", ""),
        ("JAX_PLATFORMS", "cpu", "", "gpu", "--platform cpu"),
        ("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "mpi", "", "cpu", "--env JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi"),
        ("JAX_COORDINATOR_ADDRESS", "h1:1", "", "cpu", ""),
        ("NCCL_DEBUG", "INFO", "", "gpu", ""),  # NCCL starts with the first computation
        ("OMP_NUM_THREADS", "1", "", "cpu", ""),
    ],
)
def test_the_option_of_jaxrun_to_use_instead(name, value, before, platform, instead):
    assert say_instead(name, value, before, platform, local_devices=2) == instead


def _frame(*filenames):
    """The innermost frame of functions that call each other, the outermost of the first file; all are at line 2."""
    frame = None
    for name in filenames:
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=name), f_lineno=2, f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("filenames", "place"),
    [
        (("/home/me/train.py", "<frozen os>"), "train.py:2"),
        (("/home/me/train.py", "/home/me/lib.py", "<frozen os>", env_watch.__file__), "lib.py:2"),
        (("/home/me/train.py", f"{_PACKAGES}/numpyro/util.py"), "train.py:2"),
        (("<frozen runpy>", f"{_PACKAGES}/pkg/train.py", f"{_PACKAGES}/numpyro/util.py"), "util.py:2"),
        (("<frozen runpy>",), "the program"),
    ],
)
def test_the_place_is_the_programs_own_where_it_has_a_frame(filenames, place):
    assert env_watch.find_place(_frame(*filenames)) == place
