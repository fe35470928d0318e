"""The pass lists of the targets."""
