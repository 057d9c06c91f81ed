"""`jaxrun doctor`: what is wrong, or will be, with the hosts, the network and the installation of a job.

It runs a job like any other (examine.py), reads what that leaves (observation.py), and judges it. Each family of checks
is one file, and a pure function from an Observation to Findings.
"""
