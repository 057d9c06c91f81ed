"""Gangs: jobs that stay warm and are called from a Python process; functions, notebooks, map and tests run on them.

| module           | what it does                                                                         |
|------------------|--------------------------------------------------------------------------------------|
| gang             | Gang, as `import jaxrun` offers it; starts jobs anew, and closes them                |
| pool             | jaxrun.launch; jaxrun.pool, in place of multiprocessing.Pool                         |
| map_call, map_items | applies a function to many items: divides them among ranks; makes arrays                 |
| call             | one function that runs on all ranks                                                  |
| call_events      | the events of a call, and a terminal's display                               |
| notebook_display | a notebook's display, and the values and errors of its cells                      |
| ipython          | everything that jaxrun uses of IPython                                                          |
| gang_errors      | exceptions of ranks, raised again here                                |
| gang_job         | one job of a gang, from its start to its end: launcher, connections, ranks           |
| launcher_process | the launcher, seen from outside: output, end, verdict, commands                      |
| rank_connections | where the ranks connect, and messages to and from all of them                        |
| main_imports     | the leading imports of this process's main file                                     |
| spec             | the arguments of a gang, and the launcher's command line for it                   |
"""
