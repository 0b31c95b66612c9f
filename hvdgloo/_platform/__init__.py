"""Services of the machine and of Python: cores, huge pages, queues, pickles, corrected spelling, causes of errors."""
