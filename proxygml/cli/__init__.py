"""The commands of the command line: functions whose keywords are options and whose docstrings are the help."""
