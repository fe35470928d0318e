"""Results of verbs as tables, text and JSON documents."""
