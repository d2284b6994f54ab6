"""What runs where and when, as data. Pure: knows nothing of DeepSpeed, processes or devices."""
