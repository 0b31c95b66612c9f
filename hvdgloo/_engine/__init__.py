"""Agreement between ranks on one order of operations, and its execution. Knows no framework."""
