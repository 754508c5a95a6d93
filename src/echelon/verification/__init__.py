"""Verification: run a layout and one device, and compare losses, gradients, weights and buffers."""
