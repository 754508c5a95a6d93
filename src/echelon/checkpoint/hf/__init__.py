"""Hugging Face checkpoints in and out. Importing this loads no torch.

    HF directory --import--> native directory --export--> HF directory, whose logits are then compared

    config.json          models/hf/hf_config_reader.py  ->  ModelConfig  ->  models/hf/hf_config_writer.py
    *.safetensors        safetensors_reader.py -> convert_tensors.py -> safetensors_writer.py

A directory appears complete or not at all: it is written under a temporary name and renamed.
"""
