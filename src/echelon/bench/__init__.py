"""Benchmarks of training steps: reference shapes, comparisons with other frameworks, and profiles of a step.

Every measurement runs in a process of its own (subprocess_bench.py), so that none affects the next.
"""
