"""Communication between processes: ports, proofs, the handshake, channels, framing, codecs, the event loop, forks."""
