"""A server that is not there: its links emulated under real runs, and whole steps rehearsed on it."""
