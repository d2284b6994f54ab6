"""How a model becomes layers and stages: discovery, tracing, replay. Knows nothing of plans, processes or devices."""
