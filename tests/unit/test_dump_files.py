"""Each rank's own files for what XLA dumps, and placeholders for a rank in the program's words."""

import pytest

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.placeholders import fill_in
from jaxrun_runtime import dump_files
from jaxrun_runtime.dump_files import rank_flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--xla_dump_to=dumps", "--xla_dump_to=dumps/rank-0003"),
        (
            "--a=1 --xla_dump_to=/tmp/d/ --xla_dump_hlo_as_text",
            "--a=1 --xla_dump_to=/tmp/d/rank-0003 --xla_dump_hlo_as_text",
        ),
        ("--xla_dump_to='/tmp/my dumps'", "--xla_dump_to='/tmp/my dumps/rank-0003'"),
        (
            "--xla_gpu_dump_autotune_results_to=/tmp/results.txt",
            "--xla_gpu_dump_autotune_results_to=/tmp/rank-0003-results.txt",
        ),
        ("--xla_gpu_kernel_cache_file=kernels", "--xla_gpu_kernel_cache_file=rank-0003-kernels"),
        ("--xla_gpu_dump_autotune_logs_to=a/b.pb", "--xla_gpu_dump_autotune_logs_to=a/rank-0003-b.pb"),
        ("--xla_gpu_load_autotune_results_from=r", "--xla_gpu_load_autotune_results_from=r"),  # is only read
        ("--xla_dump_to=-", "--xla_dump_to=-"),
        ("--xla_dump_to=sponge", "--xla_dump_to=sponge"),
        ("--xla_dump_to=gs://bucket/dumps", "--xla_dump_to=gs://bucket/dumps"),
        ("--xla_dump_hlo_pass_re=.* --xla_dump_to=", "--xla_dump_hlo_pass_re=.* --xla_dump_to="),
    ],
)
def test_paths_of_dumps_in_xla_flags(flags, expected):
    assert rank_flags(flags, 3) == expected


def test_the_flags_of_tpus_and_of_a_file_that_xla_flags_names_get_own_paths_too(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_files.jax_private, "read_option", lambda name: None)
    plain, dumps = tmp_path / "plain", tmp_path / "dumps"
    plain.write_text("--xla_a=1\n")
    dumps.write_text("--xla_a=1\n--xla_dump_to=d\n")

    def own(size=4, **environ):
        dump_files.keep_apart(WorkerEnv("ab" * 16, 3, size, 1, 4, "h2"), environ)
        return environ

    tpu = {"LIBTPU_INIT_ARGS": "--xla_dump_to=d"}
    assert own(**tpu) == {"LIBTPU_INIT_ARGS": "--xla_dump_to=d/rank-0003"} and own(size=1, **tpu) == tpu
    assert own(XLA_FLAGS=str(dumps)) == {"XLA_FLAGS": "--xla_a=1\n--xla_dump_to=d/rank-0003\n"}
    for other in (str(plain), str(tmp_path / "none"), "", "--xla_b"):
        assert own(XLA_FLAGS=other) == {"XLA_FLAGS": other}
    assert own() == {}


def test_placeholders():
    words = ["-o", "out.%r", "%l-%h", "100%%", "%d", "%%r"]
    worker = WorkerEnv("ab" * 16, 5, 8, 1, 4, "h2")
    assert fill_in(words, worker) == ["-o", "out.5", "1-h2", "100%", "%d", "%r"]
