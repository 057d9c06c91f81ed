"""Decide: from the request to a Plan, values only; `machine` and `devices` look at what is there."""
