"""Training goes on in another program than the one that saved."""
