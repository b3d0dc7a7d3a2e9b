"""How a rank ends, and when it ends the others."""
