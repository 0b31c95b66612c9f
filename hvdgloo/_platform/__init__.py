"""What the machine and Python offer: cores, huge pages, spelling corrections, errors carried through other code."""
