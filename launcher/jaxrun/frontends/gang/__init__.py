"""Gangs: jobs that stay warm and are called from a Python process; functions, notebooks, map and tests run on them.

| module           | what it does                                                                         |
|------------------|--------------------------------------------------------------------------------------|
| gang             | Gang, as `import jaxrun` offers it; starts jobs anew, and closes them                |
| pool             | jaxrun.launch; jaxrun.pool, in place of multiprocessing.Pool                         |
| map_call, map_items | a function of one item over many: dealt to the ranks; made arrays of                 |
| call             | one function that runs on all ranks                                                  |
| call_events      | what it reports meanwhile, and how a terminal shows it                               |
| notebook_display | how a notebook shows it, and the values and errors of its cells                      |
| ipython          | all that is used of IPython                                                          |
| gang_errors      | what the ranks raise, and how it is raised again here                                |
| gang_job         | one job of a gang, from its start to its end: launcher, connections, ranks           |
| launcher_process | the launcher, seen from outside: output, end, verdict, commands                      |
| rank_connections | where the ranks connect, and messages to and from all of them                        |
| main_imports     | what the main file of this process imports first                                     |
| spec             | what a gang is asked to be, and the command line that makes it one                   |
"""
