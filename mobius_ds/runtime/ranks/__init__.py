"""The ranks of a node: how they find each other, signal, wait, and tell of what went wrong."""
