"""KV blocks, paged KV memory, the hidden-state buffer and the batch view. Part of HiSpec; imports nothing of
it."""

OWNER = "hispec"  # hispec checks this on import: `cache` is a generic name that another package may shadow
