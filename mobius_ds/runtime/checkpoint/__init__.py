"""Checkpoints both ways: Mobius' own, ZeRO's read by Mobius, and Mobius' read by ZeRO."""
