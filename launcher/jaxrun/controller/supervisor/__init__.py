"""One job from its first process to its exit code.

| module                              |                                                                           |
|-------------------------------------|---------------------------------------------------------------------------|
| run                                 | entry: run directory, guard, fork server; then `supervise`                |
| supervise                           | the flow of every job: head, output, agents, verdict                      |
| local                               | agents of a job on this machine: one, in this process                     |
| remote, server, connections         | agents on other hosts: started by a launch command, served as they connect|
| spare_agents                        | those that wait on spare hosts                                            |
| launch_process                      | the running mpirun or srun                                                |
| loss_watch, loss_attribution        | whether it, a host or an agent went first: what is observed; what follows |
| executor                            | one attempt: events to the head, and its actions, executed                |
| dispatch                            | events to the head and the event log                                      |
| parent_link                         | orders of the Python process that started the launcher                    |
| report                              | the first line, the verdict, the exit status                              |
| attach                              | `jaxrun attach`: this process as one rank of somebody else's job          |
| command_per_host                    | one command per host: host 0 hosts the head, the others their agents      |
"""
