"""What published results give away: membership, reconstruction, tracing and linkage."""
