"""The heart: schedules as data, the plans and rules they are built from, and the proof that they are right."""
