"""The head's table of workers: when each of them ended."""

from jaxrun.head.worker_table import WorkerTable
from jaxrun.protocol.agent_messages import WorkerExited


def test_a_rank_that_had_finished_and_is_killed_later_ends_when_it_is_killed():
    table = WorkerTable({0: "h1", 1: "h1"})
    for rank in (0, 1):
        table.add_process(rank)
        table.add_done(rank, 5.0)
    table.add_exit(WorkerExited(0, 0), 50.0)
    table.add_exit(WorkerExited(1, -9), 60.0)
    assert [end.time for end in table.outcomes(70.0)] == [5.0, 60.0]
