"""One rank's device: its streams, copies and memory, and the ledger of what it moved."""
