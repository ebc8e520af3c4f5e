"""An HTTP API (`proxygml serve`), and a page on which to look at an embedding space (`proxygml browse`)."""
