"""What a caller passes in and gets back."""
