"""The collective engine: negotiation, fusion and execution. See docs/life-of-a-tensor.md."""
