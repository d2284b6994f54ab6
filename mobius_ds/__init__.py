"""Mobius pipeline training for DeepSpeed. Importing this package makes DeepSpeed aware of it."""

from mobius_ds.plugin import import_hook

__version__ = "0.1.0"

import_hook.register()
