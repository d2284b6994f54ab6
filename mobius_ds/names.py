"""Names that several rooms agree on: environment variables, marks on objects, files. Imports nothing."""

FLAG_VARIABLE = "MOBIUS_DS"
"""``0`` or ``1`` overrides ``enabled`` of every config, so that one unchanged config file can be run both ways."""

CACHE_VARIABLE = "MOBIUS_DS_CACHE"
"""The folder of plans made before. Default: ``~/.cache/mobius_ds/plans``."""

RECORD_VARIABLE = "MOBIUS_DS_RECORD"
"""A folder: every engine of the process records its steps there, for ``mobius-ds compare``."""

ADOPTED = "_mobius"
"""Attribute of a parameter that lies in a pipeline's store: what answers for it."""

RANDOM_STATE = "_mobius_random_state"
"""Attribute of a ``PipelineModule``: the state of torch's generator when its layers were built."""

CHECKPOINT_MARK = "mobius.json"
"""A file in every checkpoint that Mobius has written: its format, its seed, and the files of each parameter."""

TRACE_FILE = "trace.json"
"""In the folder of a comparison's Mobius arm."""

HOOK_FILE = "mobius_ds.pth"
"""In site-packages: what loads the plugin at the start of every interpreter."""

KNOWN_DEEPSPEED = "0.19."
"""How the versions of DeepSpeed begin that mobius_ds is tested with."""
