"""Patches DeepSpeed right after it is imported, whoever imports it.

Runs at the start of every interpreter (through ``mobius_ds.pth``), so it imports nothing but what the
interpreter has loaded already, and a failure in here never stops the import of DeepSpeed.
"""

import sys


class DeepSpeedFinder:
    """A ``sys.meta_path`` entry that lets the others find DeepSpeed and runs the hooks once it is executed."""

    def find_spec(self, name, path=None, target=None):
        """What the other finders find, with the hooks attached; None for every module but DeepSpeed."""
        if name != "deepspeed":
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _run_hooks_after(spec.loader)
                    return spec
        return None


def register() -> None:
    """Makes DeepSpeed aware of Mobius: now if it is imported already, else as soon as it is. Idempotent."""
    if not any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeepSpeedFinder())
    if "deepspeed" in sys.modules:
        _install_hooks()


def _run_hooks_after(loader) -> None:
    # The loader stays the one DeepSpeed would have had, with one method shadowed until it is called:
    # code that asks ``deepspeed.__loader__`` for sources or data notices nothing.
    if not hasattr(loader, "exec_module"):
        return
    exec_module = loader.exec_module

    def exec_module_then_hooks(module):
        loader.__dict__.pop("exec_module", None)
        exec_module(module)
        _install_hooks()

    loader.exec_module = exec_module_then_hooks


def _install_hooks() -> None:
    try:
        from mobius_ds.plugin import hooks

        hooks.install()
    except Exception as error:
        # A job that never asked for Mobius must not fail because of it.
        import warnings

        warnings.warn(
            f"mobius_ds could not hook into DeepSpeed ({error!r}): a 'mobius' section in a DeepSpeed config has no "
            "effect in this process. Install a DeepSpeed 0.19 release, or reinstall mobius_ds.",
            RuntimeWarning,
            stacklevel=2,
        )
