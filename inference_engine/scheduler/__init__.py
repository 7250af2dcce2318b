"""Scheduling: the states of a request, the choice of requests for each step, the loop that owns the device."""
