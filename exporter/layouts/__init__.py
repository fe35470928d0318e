"""Folders of other runtimes that hold an exported model."""
