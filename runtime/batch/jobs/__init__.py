"""What is kept of a job: its folder, lock and journal, and what they tell."""
