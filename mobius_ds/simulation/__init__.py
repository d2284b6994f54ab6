"""Plays a schedule on a topology, and says where the time of a step went."""
