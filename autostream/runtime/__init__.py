"""From a schedule to something that runs: lowering, CUDA streams, CUDA graphs, and streams emulated on a CPU."""
