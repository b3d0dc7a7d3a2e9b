"""``pycollective doctor`` reports what an installation and a job have, and what is wrong with them."""
