"""What planning starts from, as plain data: units, hardware, topologies, profiles of models."""
