"""The fork server: a process that imports jax once and then forks, so that N workers pay for one import.

A job has a fork server on each host, until no more workers can be needed:

    launcher ─ fork server ─ ranks                                       a job of one attempt
    launcher ─ fork server ─ its copy for one attempt ─ ranks            a job that may be started again
    Python process ─ fork server ─ launcher ─ fork server ─ ranks        a gang: launcher and second server are forks

The launcher (on other hosts the agent) is a subreaper: when the process that forked the ranks ends, the ranks become
its children. In a job of one attempt this process is the server: the launcher closes its channel when all ranks exist.
Otherwise it is a copy, which ends by itself, and the server stays as it was, with its imports. What each process saves:

  the server, before the command line is read    start-up of a small job 0.82 x the time
  the copy                                       failure to next step 0.6 s instead of 2.9 s (4 ranks, nothing imported)
  the launcher as a fork                         a gang 0.2 CPU s instead of 0.5, its start 0.5 x the time

Before it forks, a server imports the packages that the program imports first, if they are safe (preload). If a module
is not safe, or fails, the server starts again by exec, as the same process, without that module (again). The server of
a Python process also imports modules for launchers. It forks each launcher's own server before the launcher runs.

| module                      | what it does                                                              |
|-----------------------------|---------------------------------------------------------------------------|
| workers, launchers          | the two roles: forks workers, forks launchers                             |
| preload                     | imports modules for the program, and decides which to leave to it         |
| preload_scene, fork_state   | show the program to a module; find out what the module leaves behind      |
| known_unsafe                | remembers unsafe modules from earlier jobs                                |
| again                       | starts the server again by exec                                           |

`python …/jaxrun_runtime/forkserver FD ROLE [MODULE...]`: FD is the channel, a Unix socket of packets; ROLE is
`workers`, `launchers`, or `launchers-without-jax` if workers cannot be forked; MODULEs are imported in addition to jax.
"""
