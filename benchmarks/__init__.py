"""Benchmarks. Each script writes JSON and a table into ``benchmarks/results``; ``harness`` times models in modes."""
