"""From a callable to a flat graph of ATen ops, and the guards that say which calls it stands for."""
