"""What the sub-commands of the command line do: one file, one function `run` each."""
