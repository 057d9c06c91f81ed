"""Tests that run on several real JAX processes: `@pytest.mark.processes(4)`.

pytest collects as usual. A marked test runs on a warm gang; in each of its ranks there is a pytest session that waits
for messages from the parent, which is the pytest that the user started. So fixtures of all scopes, parametrize and
plain asserts are pytest's own, and live in the process that has JAX. A test has one result, however many ranks it has.

| module           | contents                                                                                 |
|------------------|------------------------------------------------------------------------------------------|
| plugin           | pytest's hooks and options; loaded in every pytest session, as are fixtures and mark      |
| fixtures         | gang, gangs, shared_tmp_path, process_count, process_index                               |
| mark             | what `@pytest.mark.processes(...)` asks for                                              |
| file_imports     | what a file of tests and its conftest files import first                                 |
| runner           | runs one test, from its mark to its reports                                              |
| warm_gangs       | the gangs, and which tests share one                                                     |
| rank_sessions    | the pytest sessions in the ranks of one gang, and what makes them like the parent's      |
| run_loop         | one test on such sessions: events in, a RunResult out; run_state: how far it has come    |
| rank_results     | the RunResult: what became of each rank, phase by phase                                  |
| phase_outcome    | results of all ranks → the outcome of a phase, as a value and in words                   |
| reports          | the outcome as pytest's reports                                                          |
"""
