"""Sound: opening, features, encoding, and the transcription of recordings of any length."""
