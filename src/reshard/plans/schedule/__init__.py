"""What both ends of an exchange agree on without talking: messages, their order, and batches."""
