"""Bad input for every reader of the package: `python -m fuzz`.

It takes minutes per reader, too long for tests/. tests/cli/test_bad_input.py damages the same files in a few structured
ways. Add every new reader to readers.py.
"""
