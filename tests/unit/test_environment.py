"""The variables that jaxrun sets in the workers and keeps from them."""

import pytest

from jaxrun.job.environment import common_settings, inherited_job_variables

_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def test_variables_of_an_earlier_job_are_stale_and_others_are_not():
    environ = {name: "x" for name in ("JAXRUN_RANK", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_PLATFORMS")}
    environ |= {
        "SLURM_PROCID": "3",
        "JAX_COORDINATOR_BIND_ADDRESS": "x",
        "JAX_SLICE_INDEX": "0",
        "JAX_PARTITION_INDEX": "0",
    }
    assert inherited_job_variables(environ) == (
        "JAXRUN_RANK",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_PROCESS_ID",
    )


@pytest.mark.parametrize(("cores", "workers", "threads"), [(16, 4, "4"), (16, 5, "3"), (2, 8, "1"), (1, 1, "1")])
def test_thread_pools_share_the_cores(cores, workers, threads):
    values = common_settings({}, cores=cores, workers=workers)
    assert {values[name] for name in _POOLS} == {threads}


def test_the_users_thread_pools_are_kept():
    values = common_settings({"OMP_NUM_THREADS": "7"}, cores=4, workers=2)
    assert "OMP_NUM_THREADS" not in values and values["MKL_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("given", "expected"), [({}, "0"), ({"PYTHONHASHSEED": "random"}, "0")])
def test_hashes_are_alike_in_all_workers(given, expected):
    assert common_settings(given, cores=1, workers=1)["PYTHONHASHSEED"] == expected


def test_the_users_hash_seed_is_kept():
    assert "PYTHONHASHSEED" not in common_settings({"PYTHONHASHSEED": "42"}, cores=1, workers=1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"no_proxy": "a.org"}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://p:1"}, "127.0.0.1,localhost,::1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.org"}, "a.org,127.0.0.1,localhost,::1"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "b", "no_grpc_proxy": "c"}, "c,127.0.0.1,localhost,::1"),
    ],
)
def test_a_proxy_is_kept_away_from_the_coordinator(environ, expected):
    assert common_settings(environ, cores=1, workers=1).get("no_grpc_proxy") == expected
