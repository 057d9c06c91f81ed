"""Which hosts a job adds to the file of --quarantine: none that may be well while something else is ill."""

import pytest
from msgspec.structs import replace
from simulation import HEAD_ADDRESS, report, seated

from jaxrun.analysis.diagnosis.job_end import HostCheckFailed, RankFailed, Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.controller.supervisor.quarantine_decision import decide_quarantine
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.spec.job.rank_placement import use_spares

SILENCE = "nothing was heard from its host for 2 s"
HOSTS = {0: "h1", 1: "h2", 2: "h3"}  # the launcher is on h1
NOT_REACHED = "no agent on another host has reported, so it may be that none can be reached from here"
ALL_LOST = "all other hosts are silent as well, so it may be this host's network"
PLAN = plan_remote(
    Job(program=("train.py",), backend="mpirun", platform="cpu", processes=3),
    {},
    "ab" * 16,
    LaunchCommand(OPEN_MPI, "mpirun", ("mpirun",), agent_hosts=("h1", "h2", "h3", "h4"), size=3),
    [*HOSTS.values()],
    (),
    ["h4"],
)


def roster_of(spares, reported, silent):
    """The seats of ranks 0 to 2, and of a spare agent on h4; these spare hosts are lost, these hosts are silent."""
    agents = {f"h{agent + 1}": agent for agent in range(4)}
    roster = seated(PLAN)
    for host in reported:
        address = {"address": HEAD_ADDRESS} if host == "h1" else {}
        roster.add_report(report(agents[host], host, 3, **address))
    for host in {*silent, *spares}:
        why = SILENCE if host in silent else "mpirun ended with status 255"
        roster.lose(agents[host], why, is_silent=host in silent)
    return roster


def decide(lost=(), spares=(), reported=(), silent=(), checks=None):
    """The lost ranks and spare hosts, the hosts whose agents have reported, and those that are silent."""
    workers = [WorkerOutcome(rank, HOSTS[rank], 5.0, None, lost_reason=SILENCE) for rank in lost]
    outcome = JobOutcome(HostCheckFailed("x", failed=checks) if checks else RankFailed(), HOSTS, tuple(workers))
    return decide_quarantine(PLAN, roster_of(spares, reported, silent), outcome)


@pytest.mark.parametrize(
    ("lost", "spares", "reported", "silent", "quarantined", "spared"),
    [
        pytest.param([1], [], ["h1", "h2", "h3"], ["h2"], ["h2"], {}, id="one host of three goes silent"),
        pytest.param([0], [], ["h1", "h2", "h3"], [], ["h1"], {}, id="an agent on the launcher's host is killed"),
        pytest.param([1], [], ["h1", "h2"], ["h2"], ["h2"], {}, id="the only other host goes silent"),
        pytest.param([1, 2], [], ["h1", "h2", "h3"], [], ["h2", "h3"], {}, id="all other agents are killed"),
        pytest.param([], ["h4"], ["h1", "h2"], [], ["h4"], {}, id="a spare host is off, others are reached"),
        pytest.param([], ["h4"], ["h1", "h2", "h4"], ["h4"], ["h4"], {}, id="a spare host is lost later"),
        pytest.param([], ["h4"], ["h4"], ["h4"], ["h4"], {}, id="a spare host has reported, and nobody else"),
        pytest.param([], ["h4"], [], [], [], {"h4": NOT_REACHED}, id="nobody has ever reported"),
        pytest.param([], ["h4"], ["h1"], [], [], {"h4": NOT_REACHED}, id="ssh reaches nobody"),
        pytest.param([1, 2], [], [], [], [], dict.fromkeys(["h2", "h3"], NOT_REACHED), id="lost before they report"),
        pytest.param(
            [1, 2], [], ["h1", "h2", "h3"], ["h2", "h3"], [], dict.fromkeys(["h2", "h3"], ALL_LOST), id="h1 is cut off"
        ),
        pytest.param(
            [1], [], ["h1", "h2", "h3"], ["h2", "h3"], [], {"h2": ALL_LOST}, id="h1 is cut off, h3 is silent later"
        ),
        pytest.param(
            [1], ["h4"], ["h1", "h2", "h4"], ["h2", "h4"], [], dict.fromkeys(["h2", "h4"], ALL_LOST), id="with a spare"
        ),
        pytest.param(
            [1, 2], [], ["h1", "h2", "h3", "h4"], ["h2", "h3"], ["h2", "h3"], {}, id="another host is not silent"
        ),
    ],
)
def test_a_lost_host_is_blamed_unless_others_may_be_lost_for_the_same_reason(
    lost, spares, reported, silent, quarantined, spared
):
    decided = decide(lost, spares, reported, silent)
    assert (sorted(decided.hosts), decided.spared) == (quarantined, spared)


def test_the_reason_says_how_a_host_was_lost():
    decided = decide([1], ["h4"], ["h1", "h2", "h3"], checks={2: "exited with status 3"})
    assert decided.hosts == {
        "h2": f"lost: {SILENCE}",
        "h3": "failed --host-check: exited with status 3",
        "h4": "lost while it waited as a spare host: mpirun ended with status 255",
    }


def test_a_spare_host_on_which_a_lost_rank_was_started_again_is_not_blamed_for_the_loss_of_that():
    roster = seated(PLAN, {0, 2, 3})
    for agent, host in enumerate(("h1", "h2", "h3", "h4")):
        roster.add_report(report(agent, host, 3))
    roster.lose(1, SILENCE, is_silent=True)
    placed = replace(use_spares(PLAN.placement, {"h2"}), agents={0: (0,), 2: (2,), 3: (1,)})
    roster.seat_spare(placed)
    roster.lose(2, SILENCE, is_silent=True)
    workers = tuple(replace(worker, host=placed.hosts[worker.rank]) for worker in PLAN.workers)
    failed = tuple(WorkerOutcome(rank, HOSTS[rank], 5.0, None, lost_reason=SILENCE) for rank in (1, 2))
    outcome = JobOutcome(RankFailed(), {0: "h1", 1: "h4", 2: "h3"}, failed)
    decided = decide_quarantine(replace(PLAN, workers=workers, placement=placed), roster, outcome)
    assert set(decided.hosts) == {"h2", "h3"}


def test_a_failed_check_is_evidence_whatever_else_is_lost():
    decided = decide([1], [], [], checks={1: "exited with status 3"})
    assert decided.hosts == {"h2": "failed --host-check: exited with status 3"} and decided.spared == {}


def test_a_job_that_started_no_worker_has_nobody_to_blame():
    outcome = JobOutcome(Unavailable("no mpirun"))
    assert decide_quarantine(PLAN, roster_of([], [], []), outcome).hosts == {}
