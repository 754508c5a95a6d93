"""Update rules on sharded parameters: one optimizer, one file.

rule.py        what an update rule is made from; groups.py: which parameters have a rate and a decay of their own
choose.py      from a rule to the update of a rank's shards; cost.py what it holds, without torch
update.py      what an engine asks of one; rounding.py: weights without a master copy
held.py        a parameter as a rank holds it; matrices.py its rows and columns; shared.py numbers ranks add up

adamw.py  adamw8.py  sgd.py  lion.py       element by element: nothing but the shard at hand
adafactor.py  sm3.py  lamb.py              numbers of whole matrices, in one or two small messages a step
muon.py                                    whole matrices, each gathered once, by the rank that works on it
with_torch.py                              AdamW and SGD by torch's fused kernels, on a CPU
average.py                                 a moving average of the weights
on_host.py                                 the update on the host, beside the device's work; hosted.py which rules may
"""
