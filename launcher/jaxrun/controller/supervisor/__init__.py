"""One job from its first process to its exit code.

| module                              |                                                                           |
|-------------------------------------|---------------------------------------------------------------------------|
| run                                 | entry: limits, run directory, guard, fork server; then `supervise`        |
| attempts                            | the flow of every job, attempt by attempt                                 |
| executor                            | one attempt: events to the head and the event log, actions executed       |
| local                               | the agent of a job on this machine, in this process                       |
| remote, server, connections         | agents on other hosts: started by a launch command, served as they connect|
| agent_receiver, spare_agents        | which of their messages count; those that wait on spare hosts             |
| next_attempt_hosts, host_search     | where the next attempt runs; which lost hosts are there again             |
| launch_process                      | the running mpirun or srun                                                |
| loss_watch                          | whether it, a host or an agent went first                                 |
| parent_link, terminal               | orders of the Python process that started the launcher; what is typed     |
| job_report                          | the first line, the verdict, the exit status                              |
| by_hand                             | `jaxrun attach`, and one command per host: this process as a part of a job|
"""
