"""``pycollective profile``: measures a cluster, for plans."""
