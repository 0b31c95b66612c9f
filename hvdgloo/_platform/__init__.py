"""What machine and Python provide: cores, huge pages, queues, pickles, corrected spelling, errors told by a text."""
