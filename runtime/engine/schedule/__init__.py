"""Scheduling: admission, queue, fairness, deadlines, and the plan of each step."""
