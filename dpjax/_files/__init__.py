"""Files that are replaced as a whole, and the file of a ledger."""
