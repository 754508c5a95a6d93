"""Pipelines: schedules as data, what they cost, what they look like, and the one runtime that executes them.

actions.py     one step of one stage on one microbatch, as data and as text
schedule.py    every rank's list of actions
schedules/     a file for each schedule, with its bubble and its activations in flight
order.py       what an action needs; channels.py: the ways that messages take between ranks
lower.py       adds sends and receives
validate.py    says every fault of a schedule
simulate.py    when every action runs, given how long actions and messages take
"""
