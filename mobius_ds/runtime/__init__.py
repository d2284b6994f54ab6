"""How a plan runs: processes, shared memory, devices, the engine."""
