"""A function whose branches run on different ranks, and one that only the parent runs."""


def by_rank(rank):
    if rank == 1:
        return "only on rank 1"
    return "only on rank 0"


def here():
    return "only in the parent"
