"""A page on which to look at an embedding space: `proxygml browse`."""
