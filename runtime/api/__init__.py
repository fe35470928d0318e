"""What ``import carryall`` offers: one function for each verb of the command line, and its report."""
