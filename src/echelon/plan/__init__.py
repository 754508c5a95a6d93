"""From a model and a cluster to a ranked, explained, runnable plan, without a device. No torch, but to trace modules.

shape.py     ModelShape: what planning needs to know of a model     sources.py   from a name, a config.json, a module
device.py    the kinds of devices and links                        cluster.py   Cluster: how many, joined how
constants.py every fitted number, with its meaning
"""
