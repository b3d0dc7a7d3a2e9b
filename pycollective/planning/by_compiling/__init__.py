"""Plans of a whole program (``pc.plan``): each way to spread it is compiled, and XLA's text says what devices do."""
