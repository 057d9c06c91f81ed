"""The file through which externally started ranks find rank 0, and what may be wrong with it."""

import json
import stat
import threading

import pytest

from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.interfaces import Interface
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.channel.reachability import check_reachable
from jaxrun.channel.rendezvous import rendezvous_file
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.job.cluster_env import RankInfo
from jaxrun.protocol.addresses import Address

JOB, TOKEN = "ab" * 16, "cd" * 32


def test_all_others_read_the_file_of_rank_0(tmp_path):
    at_0, at_3 = (rendezvous_file(RankInfo("slurm", rank, 4, "7.0"), tmp_path) for rank in (0, 3))
    assert at_3.read() is None
    at_0.write(JOB, TOKEN, "10.1.0.4:40,[fd00::4]:40")
    offer = at_3.read()
    assert (offer.job_id, offer.token) == (JOB, TOKEN)
    assert offer.addresses == (Address("10.1.0.4", 40), Address("fd00::4", 40))
    at_0.remove()
    at_0.remove()
    assert at_3.read() is None and not list(tmp_path.iterdir())


def test_nobody_else_may_read_the_token(tmp_path):
    file = rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path)
    file.write(JOB, TOKEN, "h1:40")
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600 and TOKEN not in file.path.name


@pytest.mark.parametrize(
    "other",
    [RankInfo("slurm", 0, 4, "7.1"), RankInfo("slurm", 0, 8, "7.0"), RankInfo("open-mpi", 0, 4, "7.0")],
    ids=["step", "size", "engine"],
)
def test_another_job_has_another_file(tmp_path, other):
    assert rendezvous_file(other, tmp_path).path != rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path).path


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"job_id": 1}', json.dumps({"job_id": "a", "token": "b", "head": "no address"})],
)
def test_an_empty_or_invalid_file_counts_as_none(tmp_path, text):
    file = rendezvous_file(RankInfo("slurm", 1, 4, "7.0"), tmp_path)
    file.path.write_text(text)
    assert file.read() is None


def test_a_directory_that_cannot_be_written_is_named_with_what_to_do(tmp_path):
    gone = rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UnavailableError, match="--rendezvous"):
        gone.write(JOB, TOKEN, "h1:40")


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a directory on"):
        rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path / "none")


def test_a_check_distinguishes_a_head_from_nobody(capsys):
    listener, loop = listen_on_tcp([Interface("lo", "127.0.0.1")], TOKEN, everywhere=False), EventLoop()
    listener.attach(loop, 0, lambda peer: None)
    (address,) = listener.addresses
    server = threading.Thread(target=loop.run_once, args=(10,))
    server.start()
    try:
        assert check_reachable(str(address)) == 0
        server.join()
    finally:
        listener.close()
    assert f"a head of jaxrun answers at {address}, reached from 127.0.0.1" in capsys.readouterr().out
    with pytest.raises(UnavailableError, match="no head can be reached"):
        check_reachable(str(address))
