"""Tests that run on several real JAX processes: `@pytest.mark.processes(4)`.

pytest collects as ever. A test with the mark is run by a warm gang, in each rank of which there is a pytest session
that waits for orders: so fixtures of all scopes, parametrize and plain asserts are pytest's own, and live where jax
does. One test has one result, whatever the number of its ranks.

| module      | what it knows                                                                          |
|-------------|----------------------------------------------------------------------------------------|
| plugin      | pytest's hooks and fixtures; loaded in every session, so it imports little             |
| options     | the command line and the ini file                                                      |
| mark        | what `@pytest.mark.processes(…)` asks for                                              |
| course      | what has happened in a test so far, and what is to be done about it: no I/O            |
| orders      | what a course may order                                                                |
| patience    | until when a test is waited for                                                        |
| parts       | what became of each rank                                                               |
| outcome     | parts of all ranks → the outcome of a phase                                            |
| table       | the same in words                                                                      |
| reports     | the same as reports of pytest's                                                        |
| session     | one gang with a pytest session in its ranks                                            |
| conduct     | one test on such a session                                                             |
| pool        | which gangs there are, and which tests share one                                       |
| runner      | one test, from its mark to its reports                                                 |
| neighbours  | whether mpirun, srun or the like has started this process with others                  |
| present     | those processes, as the ranks of the only gang                                         |
| limits      | how long a test may take                                                               |
| warned      | warnings of the ranks                                                                  |
| items       | what is known of a test from its collection on                                         |
| alone       | the fixture `gang` without one                                                         |
| likeness    | what makes the ranks' sessions like the parent's                                       |
| debugging   | the terminal for a rank's debugger                                                     |
| covering    | how coverage is measured here, for the ranks to do the same                            |
"""
