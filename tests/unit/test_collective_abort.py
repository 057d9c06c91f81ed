"""What a rank on a GPU sets so that it outlives a collective call whose other ranks have died."""

import pytest

from jaxrun_runtime.collective_abort import variables_for_survivors

FLAGS = (
    "--xla_gpu_nccl_terminate_on_error=false --xla_gpu_nccl_async_execution=true "
    "--xla_gpu_nccl_blocking_communicators=false"
)
VARIABLES = {"XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1", "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1"}


def test_on_nvidias_gpus_the_variables_of_jaxs_page_are_set():
    assert variables_for_survivors({"JAX_PLATFORMS": "cuda,cpu"}) == {"XLA_FLAGS": FLAGS, **VARIABLES}


@pytest.mark.parametrize("platforms", [{}, {"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "rocm,cpu"}])
def test_elsewhere_nothing_is_set(platforms):
    assert variables_for_survivors(platforms) == {}


def test_what_the_user_has_set_stays_and_other_flags_are_kept():
    own = {"XLA_FLAGS": "--xla_gpu_nccl_async_execution=false --xla_dump_to=/d", "JAX_PLATFORMS": "cuda,cpu"}
    found = variables_for_survivors({**own, **dict.fromkeys(VARIABLES, "0")})
    assert found == {
        "XLA_FLAGS": "--xla_gpu_nccl_async_execution=false --xla_dump_to=/d "
        "--xla_gpu_nccl_terminate_on_error=false --xla_gpu_nccl_blocking_communicators=false"
    }
    assert variables_for_survivors({"JAX_PLATFORMS": "cuda", "XLA_FLAGS": FLAGS, **VARIABLES}) == {}
