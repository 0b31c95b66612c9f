"""What the machine and Python provide: cores, huge pages, queues, spelling corrections, errors told by a text."""
