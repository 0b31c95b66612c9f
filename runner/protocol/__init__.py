"""What launcher and agent say to each other: frames over one stream, and heartbeats."""
