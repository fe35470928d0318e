"""The input of a job: reads files into rows and turns rows into requests, by a template if one is given."""
