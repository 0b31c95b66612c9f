"""What the machine and Python provide: cores, huge pages, queues, pickles, spelling corrections, errors in a text."""
