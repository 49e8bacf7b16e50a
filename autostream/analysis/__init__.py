"""From a traced program to an op graph: what each op reads and writes, and which ops must wait for which."""
