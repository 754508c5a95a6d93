"""Training steps measured: the reference shapes, ours beside other frameworks, and where the time of a step goes.

Every measurement is a process of its own (process.py), so nothing that one leaves in memory disturbs the next.
"""
