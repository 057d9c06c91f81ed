"""The ssh backend's process beside the launcher, the starter: starts an agent on each host by OpenSSH's client.

    launcher ─ starter ─┬─ ssh h1 ─ … ─ login shell on h1 ─ bootstrap, which becomes the agent
                        └─ ssh h2 ─ …

| module          | what it does                                                                                 |
|-----------------|----------------------------------------------------------------------------------------------|
| __main__        | `python -m jaxrun.node.ssh`: reads the starter's command line                                |
| starter         | follows all hosts at the same time, and names those that fail                                |
| started_host    | follows one host, from the connection to the end of its agent                                |
| remote_shell    | OpenSSH's client, or in its place `qrsh -inherit` of Grid Engine                             |
| session         | one process of OpenSSH's client                                                              |
| remote_command  | the line for the login shell, and the message for the interpreter that it starts             |
| bootstrap       | runs on a host before the agent, and becomes it                                              |
| carried_sources | jaxrun itself, for hosts that lack it                                                        |
| host_failures   | why hosts cannot be used, in words, with what to type                                        |
"""
