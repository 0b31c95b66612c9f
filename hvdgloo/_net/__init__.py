"""How processes communicate: ports, the handshake, framing, the codec of messages, the event loop, forks."""
