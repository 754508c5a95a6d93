"""LoRA on one device: adapters beside the linears of a frozen model."""
