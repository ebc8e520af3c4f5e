"""Bad input for every reader of the package: `python -m fuzz`.

A folder of its own beside benchmarks/ and tests/: it measures nothing, and takes minutes where a test may take seconds.
tests/test_bad_input.py damages the same files in a few structured ways; whoever adds a reader adds it to readers.py.
"""
