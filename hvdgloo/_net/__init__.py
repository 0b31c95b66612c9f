"""What processes speak with: ports, the handshake, framing, the codec of messages, the event loop, forks."""
