"""How a worker talks to the rendezvous service."""
