"""What a model's layers take: described, computed or measured."""
