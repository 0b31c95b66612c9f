"""Agreement between ranks on one order of operations, and its execution. Independent of frameworks."""
