"""Pipeline parallelism: schedules as data, their cost, their pictures, and the runtime that executes them.

Without torch:

actions.py            one step of one stage on one microbatch, as data and as text
schedule.py           every rank's list of actions
schedules/            a file for each schedule, with its bubble and its activations in flight
dependencies.py       what an action depends on; channels.py: how stages exchange tensors between ranks
lower.py              adds sends and receives
validate.py           finds every fault of a schedule
simulate.py           when every action runs, given the durations of actions and transfers
timeline.py           when every action began and ended, planned or measured
draw/                 a timeline as text, SVG and HTML
partition.py          which layers go to which stage; layer_profile.py: the cost of layers; stage_replication.py:
                      PipeDream's optimizer

With torch:

execution/            stage_assignment.py (before the model is laid out), pipeline.py and runtime.py (after), p2p.py,
                      split_backward.py (I and W), stage_param_groups.py (when parameters are gathered), layer_timing.py
async_/               PipeDream and 2BW: a runtime for endless streams, weight stashing
slices/               TeraPipe: a runtime for slices of a sequence, their lengths
"""
