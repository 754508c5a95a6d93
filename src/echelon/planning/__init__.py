"""Ranked, explained, runnable plans of a model on a cluster, without a device. No torch, except to trace modules.

planner.py      the entry point: `plan`, `find_plans`        scenario.py   a model on a cluster in a layout
model/          `ModelShape` of a model                      cluster/      `Cluster`: devices, links, measured curves
cost/           work, time and memory of a scenario          search/       layouts, bounds, the search
explain/        reasons, failures                            calibrate/    constants, corrections, scores
show/           text, HTML and tables of plans
"""
