"""A worker's side of the rendezvous service."""
