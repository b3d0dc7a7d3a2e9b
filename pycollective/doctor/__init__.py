"""``pycollective doctor`` says what a machine and a job have, and what is wrong with them."""
