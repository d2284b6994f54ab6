"""Units in messages."""

GIB = 2**30
_NAMES = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def readable(nbytes: float) -> str:
    """Bytes as a person reads them: ``1.50 GiB``, ``3.20 MiB``, ``12 bytes``."""
    for size, name in _NAMES:
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {name}"
    return f"{nbytes:.0f} bytes"
