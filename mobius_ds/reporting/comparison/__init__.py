"""One script under several engines: the arms, their jobs, and what is made of their records."""
