"""From a model and a cluster to a ranked, explained, runnable plan, without a device. No torch, but to trace modules.

what is asked     shape.py (ModelShape), sources.py, hugging_face.py, trace.py (where shapes come from), device.py,
                  cluster.py, cluster_file.py (Cluster), case.py (Case: this model there, in this layout)
what it takes     work.py (counted), constants.py (fitted), time.py (seconds by cause), memory.py (bytes by category)
which is best     price.py (Plan), layouts.py (all of them), search.py, explain.py (why), ask.py (from words to plans)
how well          rows.py (published runs as questions), score.py
how it looks      show/
"""
