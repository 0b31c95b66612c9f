"""Every collective once, for all frameworks: names, process sets, compression, gradients, objects."""
