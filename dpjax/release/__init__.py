"""From a mechanism and a database to a release."""
