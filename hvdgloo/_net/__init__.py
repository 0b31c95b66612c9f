"""Sockets of the worker and the launcher: listening ports, the authenticated handshake, descriptors after a fork."""
