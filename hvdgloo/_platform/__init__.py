"""What the machine and Python provide: cores, huge pages, queues, spelling corrections, errors carried through other code.
"""
