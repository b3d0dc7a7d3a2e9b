"""``pycollective report`` reads what a job has left: the timeline of a trace, or the records of a failure."""
