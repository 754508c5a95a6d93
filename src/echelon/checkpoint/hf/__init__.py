"""Hugging Face models in and out. Importing this loads no torch.

    HF directory --import--> ours --export--> HF directory, whose logits are then compared

    config.json          config_in.py  ->  ModelConfig  ->  config_out.py
    *.safetensors        files.py -> convert.py (tensor by tensor, by the table of models/hf/param_names.py) -> shards.py

A directory appears whole or not at all: it is written beside its place and renamed.
"""
