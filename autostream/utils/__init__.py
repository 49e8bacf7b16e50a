"""Helpers for all packages: locks, storages of tensors, operator schemas, seconds by stage."""
