"""Which layers become a stage and which GPU runs it: rules, a mixed-integer program, and what a partition costs."""
