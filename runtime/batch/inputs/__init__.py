"""What a job reads: files of any place and kind as rows, and templates over them."""
