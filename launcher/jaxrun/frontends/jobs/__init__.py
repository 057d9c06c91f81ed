"""Jobs from Python: jaxrun.run starts one and waits for its end; jaxrun.Job and jaxrun.jobs read the files of jobs."""
