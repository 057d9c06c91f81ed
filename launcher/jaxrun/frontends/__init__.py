"""What stands on a job and shows it: gangs, notebooks, pytest, top, doctor. None is needed to run one."""
