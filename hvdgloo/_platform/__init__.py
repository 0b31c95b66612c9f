"""What the machine and Python provide: cores, huge pages, spelling corrections, errors carried through other code."""
