"""The command line: flags, the configuration file, and the reports that need no job."""
