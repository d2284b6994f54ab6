"""What can go wrong when a model is cut into stages."""


class NotSplittable(ValueError):
    """The model, or this call of it, cannot be cut into stages; the message names the module and the way out."""


WAY_OUT = ('Name the modules to cut between with "mobius": {"layers": ["pattern", ...]}, '
           "or write the model as an nn.Sequential or a deepspeed.pipe.PipelineModule.")
