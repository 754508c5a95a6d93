"""Convolutional networks for images."""
