"""Answers of NCCL's own service (RAS), in the forms that its versions print; numbers and addresses are made up."""

import json

_HEAD = """NCCL version {version} compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.01s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
{rows}

Errors
======

{errors}Warnings
========

{warnings}"""
_ROW = "    0  {comms:8}         2         4  {size:8}         8   RUNNING  {status:>6}"


def text_answer(version, errors="", warnings="", *, status="OK", size=8, comms=1, rows=None):
    """What VERBOSE STATUS prints."""
    rows = rows or _ROW.format(comms=comms, size=size, status=status)
    return _HEAD.format(version=version, rows=rows, errors=errors, warnings=warnings)


# Since 2.26 there is one section for each kind of operation.
AHEAD = text_answer(
    "2.26.5",
    status="MISMATCH",
    warnings="""#0-0 (9f3c0d5511aa70e2) MISMATCH
  Communicator ranks have different AllGather operation counts
  6 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 4 -- GPU 0 managed by process 5204 on node 10.7.0.2
  Rank 5 -- GPU 1 (NVML 3) managed by process 5205 on node 10.7.0.2

""",
)
BEHIND = text_answer(
    "2.27.6",
    status="MISMATCH",
    warnings="""#0-0 (9f3c0d5511aa70e2) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 12
  Rank 5 has launched up to operation 11 -- GPU 1 managed by process 5205 on node 10.7.0.2

  Communicator ranks have different ReduceScatter operation counts
  7 ranks have launched up to operation 3
  Rank 5 has not launched any operations -- GPU 1 managed by process 5205 on node 10.7.0.2

""",
)
SILENT = text_answer(
    "2.27.6",
    status="INCOMPLETE",
    errors="""INCOMPLETE
  Missing communicator data from 1 job process
  Process 5205 on node 10.7.0.2 managing GPU 1

#0-0 (9f3c0d5511aa70e2) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 5205 on node 10.7.0.2

""",
    warnings="""TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

""",
)
# 2.24 and 2.25 count all kinds together, and do not say whose process is missing.
OLD = text_answer(
    "2.24.3",
    status="INCOMPLETE",
    errors="""DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 5205 on node 10.7.0.2 managing GPU 1

#0-0 (9f3c0d5511aa70e2) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 5

""",
    warnings="""#0-0 (9f3c0d5511aa70e2) MISMATCH
  Communicator ranks have different collective operation counts
  6 ranks have launched up to operation 6650
  Rank 3 has launched up to operation 6649 -- GPU 3 managed by process 4103 on node 10.7.0.1

""",
)
LEFT = text_answer(
    "2.28.3",
    status="MISMATCH",
    warnings="""#0-0 (9f3c0d5511aa70e2) MISMATCH
  Communicator ranks have different status
  5 ranks have status RUNNING
  2 ranks have status NOCOMM
  Rank 4 -- GPU 0 managed by process 5204 on node 10.7.0.2
  Rank 5 -- GPU 1 managed by process 5205 on node 10.7.0.2
  Rank 7 has status FINALIZE -- [process information not found]

""",
)
# A version whose memory was overwritten while it answered: numbers that no job has.
OVERWRITTEN = text_answer(
    "2.27.3",
    rows="    0         4         0         0         0         0    NOCOMM  INCOMPLETE,MISMATCH",
    errors="""#0-0 (93d7000200000001) INCOMPLETE
  Missing communicator data from 255 ranks
  Rank 1057455228 -- [process information not found]
  Rank -1073741824 -- GPU 7364967 (NVML -12) managed by process 0 on node

""",
)
WELL = text_answer("2.25.1", comms=8, size=4)


def rank(number, pid, host="10.7.0.1", **counts):
    return {
        "rank": number,
        "host": host,
        "pid": pid,
        "cuda_dev": 0,
        "nvml_dev": number % 4,
        "status": {
            "init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False,
        },
        "collective_counts": {"Broadcast": 0, "AllGather": 0, "AllReduce": 0, **counts},
    }  # fmt: skip


def missing(number, pid, host="10.7.0.1", *, unresponsive=True):
    status = {"unresponsive": unresponsive, "considered_dead": False}
    return {"rank": number, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 0, "status": status}


def communicator(*ranks, missing_ranks=(), name="9f3c0d5511aa70e2"):
    return {
        "hash": f"0x{name}",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(ranks) + len(missing_ranks),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing_ranks),
        "ranks": list(ranks),
        "missing_ranks": list(missing_ranks),
    }


def json_answer(*communicators, version="2.30.4"):
    """What STATUS prints after SET FORMAT json."""
    content = {
        "nccl_version": version,
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-28 06:10:00",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.001, "timeouts_count": 0},
    }
    return json.dumps(content, indent=2) + "\n"
