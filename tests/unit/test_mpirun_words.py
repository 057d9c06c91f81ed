"""The command lines for each kind of mpirun, as words."""

import shlex

import pytest

from jaxrun.spec.backends.mpirun import identify_version
from jaxrun.spec.engines.intel_mpi import MPIRUN as INTEL
from jaxrun.spec.engines.mpich import MPIRUN as MPICH
from jaxrun.spec.engines.mpirun_words import MpirunRequest, mpirun_argv
from jaxrun.spec.engines.open_mpi import MPIRUN_4 as OPEN_MPI_4
from jaxrun.spec.engines.open_mpi import MPIRUN_5 as OPEN_MPI_5

_HYDRA = """HYDRA build details:
    Version:                                 5.0.2
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    Launchers available:                     ssh rsh fork slurm ll lsf sge manual persist
"""
_SAYS = [
    ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", OPEN_MPI_5, "5.0.11"),
    ("mpirun (Open MPI) 10.0.0rc1\n", OPEN_MPI_5, "10.0.0rc1"),
    ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", OPEN_MPI_4, "4.1.8"),
    ("mpirun.openmpi (OpenRTE) 4.1.4\n", OPEN_MPI_4, "4.1.4"),
    (_HYDRA, MPICH, "5.0.2"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626\nCopyright 2003-2026", INTEL, "2021.18.1"),
]
OPEN_MPI, HYDRA = (OPEN_MPI_4, OPEN_MPI_5), (MPICH, INTEL)


def _words(mpirun, program=("agent", "-m"), **request):
    return mpirun_argv(mpirun, "/mpi/mpirun", MpirunRequest(directory="/data/my run", **request), program)


@pytest.mark.parametrize(("text", "mpirun", "version"), _SAYS, ids=[version for _, _, version in _SAYS])
def test_an_mpirun_is_recognised_by_its_version_text(text, mpirun, version):
    for said in (text, f"warning: something else\n{text}"):
        engine, found = identify_version(said)
        assert found is mpirun and mpirun in engine.mpirun
        assert found.version(said) == version


@pytest.mark.parametrize("text", ["", "mpirun (something) 1.2", "srun 22.05.8", "HYDRA", "mpiexec version 1.3.5"])
def test_other_programs_are_no_mpirun_that_is_known(text):
    assert identify_version(text) is None


ALIKE = {"processes": 4, "host_counts": (("h1", 2), ("h2", 2)), "per_host": 2}
DIFFERENT = {"processes": 3, "host_counts": (("h2", 2), ("h1", 1))}
DIRECTORY = "'/data/my run'"
END = f"{DIRECTORY} agent -m"
# A mpirun, a request, and the words after the mpirun's own for no binding.
COMMANDS = [
    (OPEN_MPI_4, ALIKE, f"-n 4 --host h1,h1,h2,h2 --map-by seq:oversubscribe --wdir {END}"),
    (OPEN_MPI_5, ALIKE, f"-n 4 --host h1:2,h2:2 --map-by ppr:2:node:oversubscribe --wdir {END}"),
    (MPICH, ALIKE, f"-n 4 -hosts h1:2,h2:2 -wdir {END}"),
    (INTEL, ALIKE, f"-n 4 -hosts h1,h2 -ppn 2 -wdir {END}"),
    (OPEN_MPI_4, DIFFERENT, f"-n 3 --host h2,h2,h1 --map-by seq:oversubscribe --wdir {END}"),
    (OPEN_MPI_5, DIFFERENT, f"-n 3 --host h2:2,h1:1 --map-by slot:oversubscribe --wdir {END}"),
    (MPICH, DIFFERENT, f"-n 3 -hosts h2:2,h1:1 -wdir {END}"),
    (INTEL, DIFFERENT, f"-n 2 -host h2 -wdir {END} : -n 1 -host h1 -wdir {END}"),
    *((mpirun, {"processes": 4}, f"-n 4 --map-by slot:oversubscribe --wdir {END}") for mpirun in OPEN_MPI),
    *(
        (mpirun, {"processes": 4, "per_host": 2}, f"-n 4 --map-by ppr:2:node:oversubscribe --wdir {END}")
        for mpirun in OPEN_MPI
    ),
    *((mpirun, {"processes": 4}, f"-n 4 -wdir {END}") for mpirun in HYDRA),
    *((mpirun, {"processes": 4, "per_host": 2}, f"-n 4 -ppn 2 -wdir {END}") for mpirun in HYDRA),
    # Hydra takes variables by itself, and knows nothing of root.
    *((mpirun, {"processes": 1, "as_root": True, "variables": ("A",)}, f"-n 1 -wdir {END}") for mpirun in HYDRA),
    *((mpirun, {"processes": 1, "launcher": "ssh"}, f"-launcher ssh -n 1 -wdir {END}") for mpirun in HYDRA),
    # The user's arguments come right before the program in the first block only.
    (MPICH, {"processes": 1, "user_words": ("--verbose", "a b")}, f"-n 1 -wdir {DIRECTORY} --verbose 'a b' agent -m"),
    (
        INTEL,
        {**DIFFERENT, "user_words": ("-verbose",)},
        f"-n 2 -host h2 -wdir {DIRECTORY} -verbose agent -m : -n 1 -host h1 -wdir {END}",
    ),
]


@pytest.mark.parametrize(("mpirun", "request_", "words"), COMMANDS)
def test_the_command_of_each_mpirun(mpirun, request_, words):
    assert _words(mpirun, **request_) == ("/mpi/mpirun", *mpirun.unbind_words, *shlex.split(words))


@pytest.mark.parametrize("mpirun", OPEN_MPI)
def test_open_mpi_gets_the_names_of_variables_and_an_option_for_root_once(mpirun):
    assert "-x A -x JAXRUN_TOKEN -n" in " ".join(_words(mpirun, processes=1, variables=("A", "JAXRUN_TOKEN")))
    assert _words(mpirun, processes=1, as_root=True)[1] == "--allow-run-as-root"
    words = _words(mpirun, processes=1, as_root=True, user_words=("--allow-run-as-root",))
    assert words.count("--allow-run-as-root") == 1
    assert words[-4:] == (DIRECTORY.strip("'"), "--allow-run-as-root", "agent", "-m")


@pytest.mark.parametrize(
    "choice",
    [
        {"user_words": ("--bind-to", "core")},
        {"user_words": ("-bind-to", "core")},
        {"user_words": ("--bind-to=core",)},
        {"user_words": ("--mca", "hwloc_base_binding_policy", "core")},
        {"environ": {"OMPI_MCA_hwloc_base_binding_policy": "core"}},
    ],
)
def test_the_users_binding_is_kept(choice):
    assert "none" in _words(OPEN_MPI_4, processes=1)
    assert "none" not in _words(OPEN_MPI_4, processes=1, **choice)


@pytest.mark.parametrize("mpirun", OPEN_MPI)
def test_the_users_mapping_takes_the_place_of_ours(mpirun):
    words = _words(mpirun, processes=3, host_counts=(("h1", 2), ("h2", 1)), user_words=("--map-by", "node"))
    assert words.count("--map-by") == 1
    assert "--map-by" in _words(mpirun, processes=1, user_words=("--output", "map-by"))  # which is no option
    assert "--host h1:2,h2:1 --wdir" in " ".join(words)


@pytest.mark.parametrize("mpirun", HYDRA)
def test_hydra_gets_no_launcher_for_hosts_where_the_user_chose_one(mpirun):
    for choice in (
        {"user_words": ("-launcher", "fork")},
        {"user_words": ("-bootstrap", "fork")},
        {"environ": {"HYDRA_LAUNCHER": ""}},
    ):
        assert "ssh" not in _words(mpirun, processes=1, launcher="ssh", **choice)
    assert "ssh" not in _words(OPEN_MPI_5, processes=1, launcher="ssh")
