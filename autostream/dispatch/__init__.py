"""What a call of an optimized model, or of a training step, runs."""
