"""Overlap beyond one call of a model: batches that are copied ahead, and modules that run side by side."""
