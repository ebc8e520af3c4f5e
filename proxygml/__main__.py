"""`python -m proxygml` is the command `proxygml`."""

from proxygml.cli import main

main()
