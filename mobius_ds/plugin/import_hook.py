"""Patches a package right after it is imported, whoever imports it: DeepSpeed, first of all.

Runs at the start of every interpreter (through ``mobius_ds.pth``), so it imports nothing but what the
interpreter has loaded already, and a failure in here never stops the import of DeepSpeed.
"""

import sys


class AfterImport:
    """A ``sys.meta_path`` entry that lets the others find a package and runs an action once it is executed."""

    def __init__(self, name, action):
        self.name = name
        self._action = action

    def find_spec(self, name, path=None, target=None):
        """What the other finders find, with the action attached; None for every module but the package."""
        if name != self.name:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _run_after(spec.loader, self._action)
                    return spec
        return None


def register() -> None:
    """Makes DeepSpeed aware of Mobius: now if it is imported already, else as soon as it is. Idempotent."""
    after_import("deepspeed", _install_hooks)


def after_import(name: str, action) -> None:
    """Calls ``action()`` once the package ``name`` is imported: now if it is already. One action for each name."""
    if not any(isinstance(finder, AfterImport) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(name, action))
    if name in sys.modules:
        action()


def _run_after(loader, action) -> None:
    # The loader stays the one the package would have had, with one method shadowed until it is called:
    # code that asks ``deepspeed.__loader__`` for sources or data notices nothing.
    if not hasattr(loader, "exec_module"):
        return
    exec_module = loader.exec_module

    def exec_module_then_action(module):
        loader.__dict__.pop("exec_module", None)
        exec_module(module)
        action()

    loader.exec_module = exec_module_then_action


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
