"""Brings the job together and decides how it ends: state machines without I/O, events in, actions out.

| module                                | what it is for                                                              |
|---------------------------------------|-----------------------------------------------------------------------------|
| head                                  | the state machine of one attempt to run a job, made of the following        |
| events, actions                       | what the head is told, and what it wants done                               |
| attempt, timeouts                     | the state that they share; all time limits                                  |
| startup, agent_registry, consistency  | from the agents' reports to the first line of the program                   |
| clock_offsets                         | how far the hosts' clocks are apart                                         |
| straggler_detector                    | which rank the others wait for, and where it is meanwhile                   |
| worker_table                          | what is known of each worker                                                |
| snapshots                             | what ranks do: for people, for --timeout, for hangs                         |
| stall_detector, early_exit_detector   | whether a job hangs                                                         |
| divergence_detector, call_matcher     | whether the ranks make the same calls                                       |
| replicated_programs                   | whether they run the same programs where these exchange nothing             |
| divergence_reports                    | what is told of the ranks that do not                                       |
| interruption                          | what signals do: how Ctrl-C, SIGTERM and SIGHUP end the job                 |
| shutdown                              | how a job is stopped: root cause first, then the order of the kills         |
| debugger                              | which rank's debugger has the terminal                                      |
| fault_injection                       | --chaos                                                                     |
"""
