"""What belongs to the process and to no object: all of the runtime's global state, each with its reason."""

import weakref
from pathlib import Path
from typing import Any, Dict, Tuple

MAILBOXES: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The open mailboxes. A forked child must close its copies of their connections, and at exit each says goodbye."""

REGIONS: "weakref.WeakValueDictionary[Tuple[int, int], Any]" = weakref.WeakValueDictionary()
"""The regions of weights by device and inode: a file that comes from two sides is one region."""

PIECES: Dict[int, Any] = {}
"""What a tensor uses of a region's mapping, by its first byte's address as long as a tensor does: torch hands tensors on
without what one may have attached to them."""

TRACES: Dict[Path, int] = {}
"""How many trace files were started at a path: each engine of the process gets one of its own."""
