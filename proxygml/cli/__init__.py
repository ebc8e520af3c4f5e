"""The commands of the command line: functions with their options as keywords and their help as docstrings."""
