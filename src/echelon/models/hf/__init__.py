"""Hugging Face configs and parameter names, in and out. No tensors are read here."""
