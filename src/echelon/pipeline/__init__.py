"""Pipelines: schedules as data, what they cost, what they look like, and the one runtime that executes them.

Without torch:

actions.py     one step of one stage on one microbatch, as data and as text
schedule.py    every rank's list of actions
schedules/     a file for each schedule, with its bubble and its activations in flight
order.py       what an action needs; channels.py: the ways that messages take between ranks
lower.py       adds sends and receives
validate.py    says every fault of a schedule
simulate.py    when every action runs, given how long actions and messages take
timeline.py    when every action began and ended, planned or measured; recording.py: one step of a run as both
draw/          a timeline in a terminal, as SVG and as HTML
partition.py   which links go to which stage; profile.py: what links take; replication.py: PipeDream's optimizer

With torch:

pipeline.py    `Pipeline`: a layout's schedule, stages and runtime on one rank
stage.py       the links of each stage, and what each rank holds for them
runtime.py     does what the list says; slice_runtime.py: on slices (slices.py); stream.py: on an endless stream
pipes.py       messages between ranks; handed.py: what links hand on
deferred.py    backward in two halves; units.py: when flat units move; versions.py: older weights beside the newest
measure.py     tries the links and the wires before a run
"""
