"""Benchmarks; each script writes JSON and a table into ``benchmarks/results``."""
