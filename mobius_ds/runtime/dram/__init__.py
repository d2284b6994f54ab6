"""The node's DRAM: shared memory, the store of parameters in it, and how a model's weights come to lie there."""
