"""The optimizer on the CPU: DeepSpeed's and torch's own, on masters in DRAM."""
