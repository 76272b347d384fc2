"""Linear layers whose row bits do not depend on the batch."""
