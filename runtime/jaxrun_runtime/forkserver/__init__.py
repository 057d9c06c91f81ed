"""The fork server: a process that imports jax once and then forks, so that N workers pay for one import.

A job has one on each host, from its start until no further worker can be wanted:

    launcher ─ fork server ─ ranks                                       a job of one attempt
    launcher ─ fork server ─ its copy for one attempt ─ ranks            a job that may be started again
    Python process ─ fork server ─ launcher ─ fork server ─ ranks        a gang: launcher and second server are forks

The launcher (on other hosts the agent) is a subreaper: once the process that has forked the ranks ends, they are its
children. In a job of one attempt that is the server, whose channel the launcher closes when all ranks exist. Else it is
a copy, which ends by itself; the server stays as it was, with what it has imported. What each process buys:

  the server, before the command line is read    start-up of a small job 0.82 x the time
  the copy                                       failure to next step 0.6 s instead of 2.9 s (4 ranks, nothing imported)
  the launcher as a fork                         a gang 0.15 CPU s instead of 0.65, its start 0.3 to 0.6 x the time

Before it forks, a server imports what the program imports first, as far as that is safe (preload). A module that is not
safe, or fails, makes it start again by exec, as the same process, without that module (again). The server of a Python
process imports what launchers need as well, and each launcher's own server is forked from it before the launcher runs.

| module                      | what it does                                                              |
|-----------------------------|---------------------------------------------------------------------------|
| workers, launchers          | the two roles: forks workers, forks launchers                             |
| preload                     | imports modules in the program's stead, and decides which are left to it  |
| preload_scene, fork_state   | what a module sees meanwhile; what it has left behind                     |
| known_unsafe                | what earlier jobs have found out                                          |
| again                       | begins anew by exec                                                       |

`python …/jaxrun_runtime/forkserver FD ROLE [MODULE...]`: FD is the channel, a Unix socket of packets; ROLE is
`workers`, `launchers`, or `launchers-without-jax` where the workers cannot be forked; MODULEs are imported besides jax.
"""
