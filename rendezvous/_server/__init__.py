"""The HTTP service: membership, the key-value store, and what serves them."""
