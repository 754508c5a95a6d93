"""Parallelism strategies, one package each; `apply.py` shows the order of their transforms.

Each strategy has a torch-free `cost.py` that the planner reads: dp, tp, tp_grid, cp, ep.
"""
