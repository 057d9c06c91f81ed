"""Starts agents on the hosts of a PBS job by pbsdsh, which passes on neither environment nor standard input.

    launcher ─ starter (__main__) ─┬─ pbsdsh -n 0 ─ PBS on host 0 ─ task, which becomes the agent
                                   └─ pbsdsh -n 4 ─ …

So the environment of the agents is in a file that only its owner can read, in the directory of the job; each task reads
it, and the starter removes it. What tasks print goes to the output of the PBS job.
"""
