"""Functions, notebooks, map and tests on a job that stays warm: the side of the Python process that asks for it.

| module          | what it knows                                                                         |
|-----------------|---------------------------------------------------------------------------------------|
| shape           | what a gang is asked to be, and the command line that makes it one                      |
| nursery         | the process that starts launchers, and has jax imported for all of them                |
| launcher        | one job of ours, seen from outside: its words, its end, its verdict, orders to it      |
| meeting         | where the ranks come to                                                                |
| switchboard     | the connections to all ranks of one gang                                               |
| conversation    | one function on all ranks, and what is said meanwhile                                  |
| remote          | what ranks raise, and how the parent raises it again                                   |
| life            | how a gang is started, found sick, started anew, and closed                             |
| gang            | calls on it: WarmGang, which jaxrun.api makes Gang of                             |
| lines           | what ranks print, on a terminal                                                        |
"""
