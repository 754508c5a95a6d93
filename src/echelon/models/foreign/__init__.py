"""Causal language models of Hugging Face's transformers: its own classes, unchanged, on every axis.

`hf_source` reads a directory, `causal_lm` gives transformers' class the loss contract, `layer_stack` finds its layers
and runs them one by one. transformers is an optional extra, and is imported only where a class of it is built.
"""
