"""What ``deepspeed.initialize`` returns: DeepSpeed's engines on top of a pipeline, and what they refuse."""
