"""How a running job gets its plan: what it knows, what a plan takes of its devices, and which one it is."""
