"""Files that are complete even after a crash: chunks of finished work, and ledgers."""
