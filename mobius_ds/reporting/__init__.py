"""The verbs of ``mobius-ds`` that tell: plans, traces, comparisons, advice."""
