"""All that is printed, and the log files of the ranks."""
