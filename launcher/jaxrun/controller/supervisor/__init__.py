"""Runs one job from its first process to its exit code. controller/roster.py knows who has which place in the job.

| module                          | contents                                                                   |
|---------------------------------|----------------------------------------------------------------------------|
| run_job                         | entry: limits, run directory, guard, fork server; then `supervise`         |
| attempts                        | the flow of every job, attempt by attempt                                  |
| local_job                       | runs the attempts of a job whose agents are in this process                |
| remote_job                      | runs the attempts of a job whose agents are on other hosts                 |
| attempt_head, dispatcher           | one attempt: events to the head and the event log                          |
| attempt_loop                    | one attempt: waits for what happens, executes the head's actions           |
| supervision                     | what all attempts share                                                    |
| remote_agents                   | the agents of one attempt on other hosts: reports, orders, losses          |
| transport, remote_output        | their connections, which outlive attempts; flow control of output          |
| host_watches                    | silent hosts                                                               |
| job_history                     | the attempts of a job so far, and whether there is another                 |
| kept_record                     | what agents keep of the job for another head                               |
| earlier_head                    | continues the job of a head that was lost, as agents know it               |
| losses                          | which agent, host or launch command went first                             |
| next_attempt_hosts              | where the next attempt runs                                                |
| quarantine_decision             | which lost hosts to avoid from now on                                      |
| engine_commands, launch_process | commands of mpirun or srun: for agents, and to find lost hosts again       |
| job_server, job_terminal        | requests and orders at the job's socket; typed input                       |
| notifier, sidecars              | commands of --notify; frontends beside the launcher (--live, --metrics)    |
| job_report                      | the first line, the verdict, the exit status                               |
| attach, head_name               | `jaxrun attach`, and one command per host: this process as a part of a job |
| launcher_staging                | the launcher's part in --stage                                             |
"""
