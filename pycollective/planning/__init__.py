"""Predicts how long a step of training takes, and how much memory it needs, for each way to spread it over devices."""
