"""`jaxrun doctor`: finds problems with the hosts, the network and the installation of a job, before it runs.

It runs a job like any other (examine.py), reads its files (observation.py), and judges them. Each family of checks
is one file, and a pure function from an Observation to Findings.
"""
