"""Strategies: one file each, with its cost; `apply.py` shows the order in which they meet a model.

Files that state costs (`shard`, `tensor`, `sequence`, `replicate`) import no torch at their top, because the planner
reads them; the machinery they drive (`flat`, `regions`, `vocabulary`) does.
"""
