"""`privatize`, the base class of mechanisms, and the steps of a release."""
