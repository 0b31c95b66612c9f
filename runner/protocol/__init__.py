"""The protocol between launcher and agent: frames over one stream, and heartbeats."""
