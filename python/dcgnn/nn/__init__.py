"""Layers and the model."""
