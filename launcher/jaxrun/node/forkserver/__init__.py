"""The launcher's side of the fork server, the process that imports jax once and then forks (jaxrun_runtime.forkserver).

    launcher ─ fork server (jax) ─ workers
    Python process with gangs ─ fork server (jax, launcher) ─ launcher ─ fork server (jax) ─ workers

| module        | what it does                                                                                   |
|---------------|------------------------------------------------------------------------------------------------|
| client        | starts a fork server and asks it for workers                                                   |
| prestart      | starts a job's fork server before the command line is read                                     |
| launcher_pool | starts the fork server of a Python process with gangs, and asks it for launchers               |
"""
