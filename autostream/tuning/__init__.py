"""Which schedule of a program runs: candidates, within the memory budget, measured; the fastest is kept."""
