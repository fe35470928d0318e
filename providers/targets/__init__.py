"""The providers: one file and one class a target."""
