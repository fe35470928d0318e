"""The stored state of a job: folder, lock and journal, and the outputs, status and report made from them."""
