"""Files that survive a crash: chunks of finished work, and the file of a ledger."""
