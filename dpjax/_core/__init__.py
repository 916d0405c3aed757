"""Value types, checks and frozen pytrees, which all other rooms share."""
