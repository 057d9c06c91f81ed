"""Brings the job together and decides how it ends: state machines without I/O, events in, actions out.

Times are seconds since the epoch, and always passed in.

| module                                | what it is for                                                              |
|---------------------------------------|-----------------------------------------------------------------------------|
| head                                  | the state machine of one attempt to run a job, which combines the others    |
| head_state                            | the state that they share: phase, outcome, limits, timers                   |
| timers                                | all timers: which ones run, when each is due, and what happens then         |
| round                                 | a question to several ranks or agents: asks, collects, a deadline, then     |
| startup, agent_registry, consistency  | from the agents' reports to the first line of the program                   |
| certificates                          | signs the certificates of JAX's coordinator                                 |
| staging_round                         | in which order hosts copy what --stage names                                |
| clock_offsets                         | how far the hosts' clocks are apart                                         |
| worker_table                          | the known facts about each worker                                           |
| queries                               | queries to ranks about what they are doing, and the replies as values       |
| requests                              | answers to requests of other processes: stacks, overviews, profiles         |
| health_checks                         | whether its time is over, it hangs, or ranks diverge                        |
| stall_checks, stall_detector          | whether it makes progress                                                   |
| straggler_detector, straggler_samples | which rank the others wait for, and where it is meanwhile                   |
| divergence_detector, call_matcher     | whether the ranks make the same calls                                       |
| standing_calls                        | which rank stands in which call                                             |
| divergence_reports                    | reports of ranks that do not                                                |
| interruption                          | signals: how Ctrl-C, SIGTERM and SIGHUP end the job                         |
| leaving_pods                          | a pod goes away, and the others go on (--keep-survivors)                    |
| job_shutdown                          | how a job is stopped: root cause first, then the order of the kills         |
| survivors, rank_returns               | a rank is lost, the others go on, and it comes back (--keep-survivors)      |
| replacement_hosts                     | on which other host the ranks of a lost one are started again meanwhile     |
| device_orders                         | in which order live_devices yields the devices of ranks that live           |
| stop_agreement                        | at which step all ranks stop                                                |
| scale_up                              | when a smaller job takes its hosts back                                     |
| host_wait                             | waits for lost hosts while an attempt starts (--wait-hosts)                 |
| core_shortage                         | whether ranks on CPU lose much time because they outnumber the cores        |
| memory_shortages                      | which host's memory will soon be full, and which ranks grow                 |
| conclusion                            | once all workers have ended: how they diverged, and the outcome             |
| debugger_turns                        | which rank's debugger has the terminal                                      |
| editor_debuggers                      | which ranks an editor debugs, and the bytes between them                    |
| fault_injection                       | --chaos                                                                     |
"""
