"""Other engines, watched from inside their jobs: what they move, hold and wait for."""
