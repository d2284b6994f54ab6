"""What a step would take under each engine: its schedules, simulated."""
