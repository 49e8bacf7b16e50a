"""The scheduler that ``torch.compile`` does not have."""
