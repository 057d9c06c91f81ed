"""Tests that run on several real JAX processes: `@pytest.mark.processes(4)`.

pytest collects as usual. A marked test runs on a warm gang; in each of its ranks there is a pytest session that waits
for messages from the parent, which is the pytest that the user started. So fixtures of all scopes, parametrize and
plain asserts are pytest's own, and live in the process that has JAX. A test has one result, however many ranks it has.

| module           | contents                                                                                 |
|------------------|------------------------------------------------------------------------------------------|
| plugin           | pytest's hooks; loaded in every pytest session, as are fixtures, options and mark         |
| fixtures         | gang, gangs, shared_tmp_path, process_count, process_index                               |
| options          | the command line and the ini file                                                        |
| mark             | what `@pytest.mark.processes(...)` asks for                                              |
| runner           | runs one test, from its mark to its reports                                              |
| pool             | the gangs, and which tests share one                                                     |
| session          | one gang with a pytest session in each rank, and what makes these like the parent's      |
| run_loop         | one test on such a session: events in, actions executed                                  |
| run_state        | what has happened in the test so far, what to do next and when, without I/O              |
| rank_results     | how far each rank has come, whether they are in step, what became of each                |
| outcome          | results of all ranks → the outcome of a phase, as a value and in words                   |
| reports          | the outcome as pytest's reports                                                          |
"""
